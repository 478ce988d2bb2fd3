"""The journal of an unfinished conversion: one line for each finished tensor, appended after its bytes are written."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowprec.checkpoint.files import cannot_read, cannot_write
from lowprec.contract import canonical


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A finished tensor: checksums of its source's pieces, by the dialect's words, and of its outputs, by name."""

    source: Mapping[str, str]
    outputs: Mapping[str, str]


class Journal:
    """Entries by logical name, kept in a file. A line that was cut off by a crash counts as never written."""

    def __init__(self, path: Path) -> None:
        """Read what is there; nothing is written yet. Raises CheckpointError."""
        self._path = path
        self._lock = threading.Lock()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise cannot_read(path, error) from None
        self._length = data.rfind(b"\n") + 1
        self.entries: dict[str, Entry] = {}
        for line in data[: self._length].splitlines():
            parsed = _parse(line)
            if parsed is not None:
                self.entries[parsed[0]] = parsed[1]

    def append(self, name: str, entry: Entry) -> None:
        """Record a finished tensor. Raises CheckpointError, leaving the file as it was."""
        line = canonical({"name": name, "outputs": dict(entry.outputs), "source": dict(entry.source)}).encode() + b"\n"
        with self._lock:
            try:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    if os.pwrite(descriptor, line, self._length) < len(line):
                        os.pwrite(descriptor, line, self._length)  # a short write is how a full disk begins
                    os.ftruncate(descriptor, self._length + len(line))
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(descriptor, self._length)
                    raise
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise cannot_write(self._path, error) from None
            self._length += len(line)
            self.entries[name] = entry


def _parse(line: bytes) -> tuple[str, Entry] | None:
    """Name and entry, or None for a line that is not one: its tensor is then done again."""
    try:
        content = json.loads(line)
        name, source, outputs = content["name"], content["source"], content["outputs"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    sums = [*source.values(), *outputs.values()] if isinstance(source, dict) and isinstance(outputs, dict) else [None]
    if not isinstance(name, str) or not all(isinstance(item, str) for item in sums):
        return None
    return name, Entry(source=source, outputs=outputs)
