"""Which files a conversion writes and what lies in them, from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass

from lowprec.plan import TensorInfo


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """One safetensors file: its tensors in the order they lie in it, and its whole size in bytes."""

    name: str
    tensors: tuple[TensorInfo, ...]
    size: int


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A file of the source that is not carried over, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every file of the result. indexed: there is a model.safetensors.index.json. total_size: bytes of all tensors."""

    shards: tuple[ShardLayout, ...]
    indexed: bool
    total_size: int
    carried: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
