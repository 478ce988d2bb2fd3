"""Safetensors files tensor by tensor: never mapped, never held whole.

A reader and a writer hold no descriptor between calls, so a checkpoint of a thousand files needs no more of them than
one of one file, and many threads may use both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import CheckpointError
from ..formats.base import Array
from ..plan import TensorInfo
from .files import Bytes, cannot_read, cannot_write, open_regular
from .header import NUMPY_DTYPES, Placed, encode_header, read_header, stored_order

CHUNK = 8 << 20  # bytes; a multiple of every item size


class ShardReader:
    """One safetensors file whose header was checked."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CheckpointError."""
        self.path = path
        self.header = read_header(path)

    def read(self, name: str) -> Array:
        """One tensor, as a new array of its dtype and shape. Raises CheckpointError."""
        placed = self.header.tensors[name]
        return as_array(_read_range(self.path, placed.offset, placed.info.nbytes), placed.info)

    def chunks(self, name: str, buffer: Bytes | None = None) -> Iterator[Bytes]:
        """One tensor's bytes in order, at most `CHUNK` at a time. Raises CheckpointError.

        With a `buffer` every piece lies in it, and is gone when the next is asked for.
        """
        return _read_chunks(self.path, self.header.tensors[name], buffer)

    def read_into(self, name: str, start: int, data: Bytes) -> None:
        """Fill `data` with the tensor's bytes from `start` on. Raises CheckpointError."""
        placed = self.header.tensors[name]
        assert start + data.nbytes <= placed.info.nbytes, "a piece must lie inside its tensor"
        _read_into(self.path, placed.offset + start, data)


class ShardWriter:
    """One safetensors file that is made at its full size and then filled, tensor by tensor, in any order.

    path: where the file lies; it may be set anew when the file has been moved.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo]) -> None:
        """Lay the file out; nothing is written yet. Raises CheckpointError if the header would be too large."""
        self.path = path
        ordered = stored_order(tensors)
        self._head = encode_header(ordered)
        self.tensors: dict[str, Placed] = {}
        position = len(self._head)
        for info in ordered:
            self.tensors[info.name] = Placed(info=info, offset=position)
            position += info.nbytes
        self.size = position

    def is_prepared(self) -> bool:
        """Whether the file is there with the right size and header, so that what was written to it can be kept."""
        try:
            descriptor = open_regular(self.path)
        except CheckpointError:
            return False
        try:
            return os.fstat(descriptor).st_size == self.size and os.pread(descriptor, len(self._head), 0) == self._head
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def create(self) -> None:
        """Make the file anew at its full size, with its header and nothing else. Raises CheckpointError."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                _reserve(descriptor, self.size)
                _write_all(descriptor, np.frombuffer(self._head, np.uint8), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def write(self, name: str, start: int, data: Bytes) -> None:
        """Store a piece of a tensor, `start` bytes after the tensor's first. Raises CheckpointError."""
        placed = self.tensors[name]
        assert start + data.nbytes <= placed.info.nbytes, "a piece must lie inside its tensor"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_all(descriptor, data, placed.offset + start)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def chunks(self, name: str) -> Iterator[Bytes]:
        """Read a tensor back in pieces. Raises CheckpointError."""
        return _read_chunks(self.path, self.tensors[name])

    def sync(self) -> None:
        """Bring the file to the disk. Raises CheckpointError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from None


def as_bytes(array: Array) -> Bytes:
    """The array's bytes in row-major order, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def as_array(data: Bytes, info: TensorInfo) -> Array:
    """The bytes of a stored tensor as an array of its dtype and shape."""
    return data.view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)


def _read_chunks(path: Path, placed: Placed, buffer: Bytes | None = None) -> Iterator[Bytes]:
    size = CHUNK if buffer is None else buffer.nbytes
    for start in range(0, placed.info.nbytes, size):
        count = min(size, placed.info.nbytes - start)
        piece = allocate(count, path) if buffer is None else buffer[:count]
        _read_into(path, placed.offset + start, piece)
        yield piece


def allocate(count: int, path: Path) -> Bytes:
    """Fresh memory for a piece of a file. Raises CheckpointError if there is none."""
    try:
        return np.empty(count, np.uint8)
    except MemoryError:
        raise CheckpointError(f"'{path}': no memory for a tensor of {count} bytes; use fewer --workers") from None


def _read_range(path: Path, offset: int, count: int) -> Bytes:
    """Exactly `count` bytes. Raises CheckpointError."""
    data = allocate(count, path)
    _read_into(path, offset, data)
    return data


def _read_into(path: Path, offset: int, data: Bytes) -> None:
    """Fill `data`. Raises CheckpointError, also if the file became shorter since its header was read."""
    descriptor = open_regular(path)
    try:
        done = 0
        while done < data.nbytes:
            read = os.preadv(descriptor, [data.data[done:]], offset + done)
            if not read:
                raise CheckpointError(f"'{path}' became shorter while it was read")
            done += read
    except OSError as error:
        raise cannot_read(path, error) from None
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: Bytes, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data.data[done:], offset + done)


def _reserve(descriptor: int, size: int) -> None:
    """Give the file its size and, where the file system can, its blocks, so that a full disk is noticed here."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)
