"""Reading and writing whole small files, with every failure as one clear CheckpointError."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def checksum(data: bytes | Bytes) -> str:
    """xxh3-128 of the bytes, as 32 hex digits."""
    return xxhash.xxh3_128(data if isinstance(data, bytes) else data.data).hexdigest()


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that the operating system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"'{path}' does not exist")
    return CheckpointError(f"'{path}' cannot be read: {error.strerror or error}")


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that cannot be written; a full disk says how to go on."""
    if error.errno in _NO_SPACE:
        return CheckpointError(
            f"'{path}' cannot be written: {error.strerror}; free some space and run the same command again, "
            "it continues where it stopped"
        )
    return CheckpointError(f"'{path}' cannot be written: {error.strerror or error}")


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file. Raises CheckpointError, also for a folder, a pipe or a device."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer before we can refuse it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise cannot_read(path, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"'{path}' is not a regular file")
    return descriptor


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises CheckpointError."""
    with open(open_regular(path), "rb") as file:
        try:
            return file.read()
        except OSError as error:
            raise cannot_read(path, error) from None


def read_json(path: Path, *, unique: bool = True) -> dict[str, Any]:
    """A JSON file that holds one object.

    Args:
        path: the file.
        unique: refuse an object that gives a key twice.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object.
    """
    return parse_object(read_bytes(path), f"'{path}'", unique=unique)


def parse_object(data: bytes, where: str, *, unique: bool = True) -> dict[str, Any]:
    """One JSON object from UTF-8 text. `where` begins the message. Raises CheckpointError."""
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys if unique else None)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).replace("\n", " ")
        raise CheckpointError(f"{where} is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return content


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file and bring it to the disk. Raises CheckpointError."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk, so that a rename survives a power cut."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from None
