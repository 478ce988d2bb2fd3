"""Memory that a thread uses again and again: to get fresh pages takes longer than the arithmetic on them."""

from __future__ import annotations

import math
import threading
from pathlib import Path

from lowprec.checkpoint.files import Bytes
from lowprec.checkpoint.shards import allocate
from lowprec.formats.base import Array, ArraySpec


class Buffers(threading.local):
    """One set of named blocks for each thread that asks; a block grows to the largest that was asked of it."""

    def __init__(self) -> None:
        self._blocks: dict[str, Bytes] = {}

    def bytes(self, name: str, count: int, path: Path) -> Bytes:
        """Bytes of any content, valid until the same thread asks for `name` again.

        Raises:
            CheckpointError: no memory; the message begins with `path`.
        """
        block = self._blocks.get(name)
        if block is None or block.nbytes < count:
            self._blocks.pop(name, None)  # before the larger one is there
            block = self._blocks[name] = allocate(count, path)
        return block[:count]

    def array(self, name: str, spec: ArraySpec, path: Path) -> Array:
        """The same as an array."""
        count = math.prod(spec.shape) * spec.dtype.itemsize
        return self.bytes(name, count, path).view(spec.dtype).reshape(spec.shape)
