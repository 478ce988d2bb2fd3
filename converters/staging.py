"""An unfinished conversion lives in TARGET/.lowprec-partial until every tensor is done; then it moves into TARGET.

Kill it at any moment: the next run finds a complete target, or this folder with

    .lock           held by the run at work; two runs exclude each other
    .state.json     what the target is made from
    .journal.jsonl  one line for each finished tensor
    *.safetensors   files of their full size that fill up

Our own names begin with a dot, which no file of a result does, so none of them can take another's place.
config.json moves last, so a target that has one is complete, and no engine loads one that is not.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from lowprec.checkpoint import MANIFEST_NAME, ShardWriter, read_json, read_manifest
from lowprec.checkpoint.files import cannot_read, cannot_write, sync_folder, write_file
from lowprec.errors import CheckpointError

from .hf import CONFIG, INDEX
from .identity import Identity
from .journal import Journal
from .lock import LOCK, locked
from .report import Conversion

PARTIAL = ".lowprec-partial"
_STATE = ".state.json"
_JOURNAL = ".journal.jsonl"
_NEW_STATE = ".state.new"
_OWN = frozenset({LOCK, _STATE, _NEW_STATE, _JOURNAL})
_BLOCK = 512  # the unit of st_blocks, whatever the file system's own is


class Survey(enum.Enum):
    """What lies in a target."""

    EMPTY = "empty"
    BEGUN = "begun"
    FINISHED = "finished"


class Staging:
    """The target of one conversion, from nothing to complete."""

    def __init__(self, target: Path, conversion: Conversion, identity: Identity) -> None:
        """Nothing is read or written yet."""
        self.target = target
        self.folder = target / PARTIAL
        self._identity = identity
        self._layout = conversion.layout
        self._outputs = {name: {info.name for info in infos} for name, infos in conversion.outputs.items()}
        self.writers = {
            shard.name: ShardWriter(self.folder / shard.name, shard.tensors) for shard in conversion.layout.shards
        }
        self._writer_of = {name: self.writers[shard] for name, shard in conversion.layout.weight_map().items()}
        self._names = {*self.writers, *conversion.configs, MANIFEST_NAME, INDEX}
        self._names |= {name.partition("/")[0] for name in conversion.layout.carried}
        self._parents = {name.partition("/")[0] for name in conversion.layout.carried if "/" in name}

    # ---- before the lock: reads only ---------------------------------------------------------------------------

    def survey(self) -> Survey:
        """What the target is.

        Raises:
            CheckpointError, ContractError: it is not ours, or belongs to another contract, source or options.
        """
        try:
            names = set(os.listdir(self.target))
        except FileNotFoundError:
            return Survey.EMPTY
        except OSError as error:
            if os.path.isfile(self.target):
                raise CheckpointError(f"target '{self.target}' is a file; give a folder") from None
            raise cannot_read(self.target, error) from None
        if {CONFIG, MANIFEST_NAME} <= names:
            self._identity.require_same(Identity.of_manifest(read_manifest(self.target)).to_json(), self.target)
            return Survey.FINISHED
        state = self.folder / _STATE
        begun = state.exists()
        foreign = sorted(names - {PARTIAL} - (self._names if begun else set()))
        foreign += self._foreign_in_folder()
        if begun:
            self._identity.require_same(read_json(state), self.target)
        if foreign:
            raise CheckpointError(
                f"target '{self.target}' is not empty: '{foreign[0]}' does not belong to this conversion; "
                "give a new or empty folder"
            )
        return Survey.BEGUN if begun else Survey.EMPTY

    def _foreign_in_folder(self) -> list[str]:
        """What lies in the partial folder or in its place and is not ours: we would write through it, or remove it.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            return [PARTIAL]
        try:
            with os.scandir(self.folder) as entries:
                return sorted(f"{PARTIAL}/{entry.name}" for entry in entries if not self._is_ours(entry))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise cannot_read(self.folder, error) from None

    def _is_ours(self, entry: os.DirEntry[str]) -> bool:
        if entry.name not in self._names | _OWN:
            return False
        return entry.is_file(follow_symlinks=False) or (entry.name in self._parents and not entry.is_symlink())

    def require_space(self, others: int) -> None:
        """Refuse to start if the result cannot fit. `others`: bytes of everything but the shards.

        Raises:
            CheckpointError: the file system has fewer free bytes than are still needed.
        """
        needed = others + sum(max(0, writer.size - self._allocated(name)) for name, writer in self.writers.items())
        place = next(path for path in (self.target, *self.target.absolute().parents) if path.exists())
        try:
            stats = os.statvfs(place)
        except OSError as error:
            raise cannot_read(place, error) from None
        free = stats.f_bavail * stats.f_frsize
        if needed > free:
            raise CheckpointError(
                f"target '{self.target}' needs {needed} more bytes, but its file system has only {free} free"
            )

    def _allocated(self, shard: str) -> int:
        try:
            return self._path_of(shard).stat().st_blocks * _BLOCK
        except OSError:
            return 0

    # ---- under the lock ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other runs. A run that ends before it began leaves nothing behind. Raises CheckpointError."""
        is_new = not self.target.exists()
        with locked(self.folder, self.target):
            try:
                yield
            finally:
                if not (self.folder / _STATE).exists():
                    self._remove_folder()
                    with contextlib.suppress(OSError):
                        if is_new:
                            self.target.rmdir()

    def prepare(self) -> Journal:
        """Make the state and every file that is not there, and tell what earlier runs finished. Raises CheckpointError.

        An entry of the journal counts only if the file that its tensors lie in is as it was laid out.
        """
        state = self.folder / _STATE
        if not state.exists():
            write_file(self.folder / _NEW_STATE, json.dumps(self._identity.to_json(), sort_keys=True).encode())
            _move(self.folder / _NEW_STATE, state)
            sync_folder(self.folder)
        journal = Journal(self.folder / _JOURNAL)
        fresh = set()
        for name, writer in self.writers.items():
            writer.path = self._path_of(name)
            if not writer.is_prepared():
                writer.path = self.folder / name
                writer.create()
                fresh.add(name)
        unusable = {info.name for shard in self._layout.shards if shard.name in fresh for info in shard.tensors}
        journal.entries = {
            name: entry
            for name, entry in journal.entries.items()
            if set(entry.outputs) == self._outputs.get(name) and not unusable.intersection(entry.outputs)
        }
        return journal

    def _path_of(self, shard: str) -> Path:
        """Where a shard lies: in the partial folder, or already in the target."""
        partial = self.folder / shard
        return self.target / shard if not partial.exists() and (self.target / shard).exists() else partial

    def writer_of(self, name: str) -> ShardWriter:
        """The file that a stored tensor lies in."""
        return self._writer_of[name]

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Move everything into the target, config.json last, and remove the partial folder.

        Args:
            files: every file but the shards, in the order in which they move: config.json is the last.

        Raises:
            CheckpointError: something cannot be written; the next run goes on.
        """
        for name, data in files.items():
            _make_parent(self.folder / name)
            write_file(self.folder / name, data)
        for writer in self.writers.values():
            writer.sync()
        for name in [*self.writers, *files]:
            if (self.folder / name).exists():
                _make_parent(self.target / name)
                _move(self.folder / name, self.target / name)
        sync_folder(self.target)
        self._remove_folder()

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Check, without reading tensors, that a finished target has every file, and remove what is left to remove.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        broken = []
        for name, writer in self.writers.items():
            writer.path = self.target / name
            if not writer.is_prepared():
                broken.append(name)
        for name, data in files.items():
            try:
                if (self.target / name).read_bytes() != data:
                    broken.append(name)
            except OSError:
                broken.append(name)
        if broken:
            raise CheckpointError(
                f"target '{self.target}' was finished, but '{broken[0]}' is missing or was changed since; "
                "see lowprec verify, and delete the target to convert again"
            )
        if self.folder.exists():
            with self.locked():
                (self.folder / _STATE).unlink(missing_ok=True)

    def _remove_folder(self) -> None:
        """Remove the partial folder, the lock last; another run may already wait for it."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                path = self.folder / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif name != LOCK:
                    path.unlink()
            (self.folder / LOCK).unlink()
            self.folder.rmdir()


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(path.parent, error) from None


def _move(path: Path, to: Path) -> None:
    try:
        os.replace(path, to)
    except OSError as error:
        raise cannot_write(to, error) from None
