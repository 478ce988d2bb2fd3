"""One run at a time: an exclusive lock on a file that the last run removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lowprec.checkpoint.files import cannot_write
from lowprec.errors import CheckpointError

LOCK = ".lock"
_ATTEMPTS = 100


@contextlib.contextmanager
def locked(folder: Path, target: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if need be.

    The kernel drops the lock with its process, however that ends.

    Raises:
        CheckpointError: another process or thread holds it, or the folder cannot be written.
    """
    descriptor = _acquire(folder, target)
    try:
        yield
    finally:
        os.close(descriptor)


def _acquire(folder: Path, target: Path) -> int:
    path = folder / LOCK
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # a run that ends removed the folder between the two
            continue
        except OSError as error:
            raise cannot_write(target, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(f"another run is writing to '{target}'; wait until it is done, or stop it") from None
        except OSError as error:
            os.close(descriptor)
            raise cannot_write(path, error) from None
        if _is_file(path, descriptor):
            return descriptor
        os.close(descriptor)  # it was removed while we waited for it: lock the new one
    raise CheckpointError(f"the lock '{path}' cannot be had; other runs keep removing it")


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether `path` still is the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
