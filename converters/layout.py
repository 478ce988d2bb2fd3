"""Which files a conversion writes and what lies in them, from the plan alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowprec.checkpoint import checksum, encode_header, stored_order
from lowprec.errors import PlanError
from lowprec.plan import SourceTensor, TensorInfo

Json = dict[str, Any]
Outputs = Mapping[str, tuple[TensorInfo, ...]]  # logical name -> what is stored for it

# Keys under which a source's config may say how it is quantized, wherever they stand in it.
_QUANTIZATION_KEYS = frozenset({"quantization_config", "compression_config"})


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """One safetensors file: its tensors in the order they lie in it, and its whole size in bytes."""

    name: str
    tensors: tuple[TensorInfo, ...]
    size: int

    def to_json(self) -> Json:
        """Plain values; of the tensors their names."""
        return {"name": self.name, "size": self.size, "tensors": [info.name for info in self.tensors]}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A file of the source that is not carried over, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every file of the result but its configs.

    indexed: there is a model.safetensors.index.json. total_size: bytes of all tensors, without headers.
    """

    shards: tuple[ShardLayout, ...]
    indexed: bool
    total_size: int
    carried: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    def weight_map(self) -> dict[str, str]:
        """Stored tensor -> file."""
        return {info.name: shard.name for shard in self.shards for info in shard.tensors}

    def digest(self) -> str:
        """A digest of every file's name, header and size, and of what is carried over."""
        headers = {shard.name: checksum(encode_header(shard.tensors)) for shard in self.shards}
        return checksum(json.dumps([headers, self.indexed, self.carried], sort_keys=True).encode())

    def index(self) -> Json:
        """Content of model.safetensors.index.json."""
        return {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(self.weight_map().items()))}


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where a result's tensors go if the source's files are kept, and which other files come along.

    shard_of: logical name -> file. indexed: the source has an index.
    """

    shard_of: Mapping[str, str]
    indexed: bool
    carried: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def home(source: SourceTensor, shard_of: Mapping[str, str]) -> str:
    """The file of a logical tensor: that of its largest piece, which holds the codes."""
    main = max(source.parts.values(), key=lambda info: (info.nbytes, info.name))
    return shard_of[main.name]


def plan_layout(outputs: Outputs, files: Files, max_shard_size: int | None) -> Layout:
    """Lay the result out: in the source's files, or in new ones of at most `max_shard_size` bytes of tensors.

    What is stored for one logical tensor lies in one file; a tensor larger than the limit has a file of its own.

    Raises:
        PlanError: two tensors would be stored under one name, or the limit is not a positive number.
    """
    _check_names(outputs)
    if max_shard_size is None:
        groups = _by_source_file(outputs, files.shard_of)
        indexed = files.indexed
    else:
        groups = _by_size(outputs, max_shard_size)
        indexed = len(groups) > 1
    shards = tuple(_shard(name, infos) for name, infos in sorted(groups.items()))
    return Layout(
        shards=shards,
        indexed=indexed,
        total_size=sum(info.nbytes for shard in shards for info in shard.tensors),
        carried=files.carried,
        left_out=files.left_out,
    )


def _check_names(outputs: Outputs) -> None:
    owner: dict[str, str] = {}
    for logical, infos in outputs.items():
        for info in infos:
            other = owner.setdefault(info.name, logical)
            if other != logical:
                raise PlanError(f"'{logical}' and '{other}' would both be stored as '{info.name}'")


def _by_source_file(outputs: Outputs, shard_of: Mapping[str, str]) -> dict[str, list[TensorInfo]]:
    groups: dict[str, list[TensorInfo]] = {}
    for logical, infos in outputs.items():
        groups.setdefault(shard_of[logical], []).extend(infos)
    return groups


def _by_size(outputs: Outputs, limit: int) -> dict[str, list[TensorInfo]]:
    """Fill one file after the other in natural order of the names, so that a layer's tensors lie together."""
    if type(limit) is not int or limit <= 0:
        raise PlanError(f"the maximal shard size must be a positive number of bytes, not {limit!r}")
    groups: list[list[TensorInfo]] = []
    room = -1
    for logical in sorted(outputs, key=_natural):
        infos = outputs[logical]
        size = sum(info.nbytes for info in infos)
        if size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].extend(infos)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _shard(name: str, infos: Sequence[TensorInfo]) -> ShardLayout:
    ordered = stored_order(infos)
    size = len(encode_header(ordered)) + sum(info.nbytes for info in ordered)
    return ShardLayout(name=name, tensors=ordered, size=size)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name) if part]


def config_with(config: Json, quantization: Json | None, dtype: str | None) -> Json:
    """The result's config.json: the source's without any word of its quantization, and with ours.

    Args:
        config: the source's config.json.
        quantization: our `quantization_config`, or None.
        dtype: what the weights were dequantized to, if they were; replaces the dtype that the config states.
    """
    cleaned: Json = _without_quantization({key: value for key, value in config.items() if key != "hf_quant_config"})
    if dtype is not None:
        cleaned.update({key: dtype for key in ("dtype", "torch_dtype") if key in cleaned})
    return cleaned if quantization is None else {**cleaned, "quantization_config": quantization}


def _without_quantization(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_quantization(item) for key, item in value.items() if key not in _QUANTIZATION_KEYS}
    return [_without_quantization(item) for item in value] if isinstance(value, list) else value
