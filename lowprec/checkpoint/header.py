"""The header of a safetensors file: read strictly, written deterministically.

A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes. Agrees with the
safetensors library (safetensors/src/tensor.rs) and is stricter: a key must not occur twice, names must be printable,
and the tensors must fill the rest of the file without hole or overlap.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import CheckpointError
from ..plan import DTYPE_BYTES, TensorInfo
from .files import cannot_read, checksum, open_regular, parse_object

HEADER_LIMIT = 100_000_000  # bytes of JSON; the library's own limit
ALIGNMENT = 8  # of the first tensor; with tensors in order of descending item size every one is aligned
_LENGTH = struct.Struct("<Q")
_LARGEST_SIZE = 2**63 - 1

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "I64": np.dtype(np.int64),
        "I32": np.dtype(np.int32),
        "I16": np.dtype(np.int16),
        "I8": np.dtype(np.int8),
        "U64": np.dtype(np.uint64),
        "U32": np.dtype(np.uint32),
        "U16": np.dtype(np.uint16),
        "U8": np.dtype(np.uint8),
        "BOOL": np.dtype(np.bool_),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A stored tensor and the offset of its first byte in the file."""

    info: TensorInfo
    offset: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """A file's header. tensors: in the order of their bytes. size: of the whole file. digest: of the header's bytes."""

    tensors: Mapping[str, Placed]
    metadata: Mapping[str, str]
    size: int
    digest: str


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: unreadable, truncated, or not exactly what the format allows.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        start = os.pread(descriptor, _LENGTH.size, 0)
        if len(start) < _LENGTH.size:
            raise CheckpointError(f"'{path}' is truncated: {size} bytes cannot hold a safetensors header")
        (length,) = _LENGTH.unpack(start)
        if length > HEADER_LIMIT:
            raise CheckpointError(
                f"'{path}' is not a safetensors file: its header would have {length} bytes, the limit is {HEADER_LIMIT}"
            )
        text = os.pread(descriptor, length, _LENGTH.size)
    except OSError as error:
        raise cannot_read(path, error) from None
    finally:
        os.close(descriptor)
    if len(text) < length:
        raise CheckpointError(f"'{path}' is truncated: the header has {length} bytes, the file {size}; fetch it again")
    tensors, metadata = _parse(text, _LENGTH.size + length, size, path)
    return Header(tensors=tensors, metadata=metadata, size=size, digest=checksum(start + text))


def _parse(text: bytes, data_start: int, size: int, path: Path) -> tuple[Mapping[str, Placed], Mapping[str, str]]:
    """Tensors in the order of their bytes, and the metadata."""
    if not text.startswith(b"{"):
        raise CheckpointError(f"'{path}' is not a safetensors file: its header does not begin with '{{'")
    entries = parse_object(text, f"the header of '{path}'")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"the header of '{path}': __metadata__ must map names to texts")
    found = sorted((_parse_entry(name, entry, path) for name, entry in entries.items()), key=lambda item: item[1:])
    position = 0
    for info, begin, end in found:
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"'{path}': tensor '{info.name}' at {begin} {what}, which ends at {position}")
        position = end
    if data_start + position > size:
        raise CheckpointError(
            f"'{path}' is truncated: the header describes {data_start + position} bytes, the file has {size}; "
            "fetch it again"
        )
    if data_start + position < size:
        raise CheckpointError(f"'{path}' has {size - data_start - position} bytes that no tensor of its header covers")
    return {info.name: Placed(info=info, offset=data_start + begin) for info, begin, _ in found}, metadata


def _parse_entry(name: str, entry: Any, path: Path) -> tuple[TensorInfo, int, int]:
    """One tensor's info and its byte range after the header."""
    if not name or not name.isprintable():
        raise CheckpointError(f"the header of '{path}': {name!r} is not a printable tensor name")
    where = f"'{path}': tensor '{name}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where} has dtype {dtype!r}, which is not supported (known: {', '.join(DTYPE_BYTES)})")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where} has shape {shape!r}, which is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}, which are not two offsets")
    info = TensorInfo(name=name, dtype=dtype, shape=tuple(shape))
    begin, end = offsets
    if end - begin != info.nbytes:
        raise CheckpointError(f"{where} is {dtype} {shape}, {info.nbytes} bytes, but its data_offsets are {offsets}")
    return info, begin, end


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)


def stored_order(tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """The order in which we store tensors: descending item size, then name, so that each is aligned to its items."""
    return tuple(sorted(tensors, key=lambda info: (-DTYPE_BYTES[info.dtype], info.name)))


def encode_header(tensors: Sequence[TensorInfo]) -> bytes:
    """The first bytes of a file that holds `tensors` one after the other; a multiple of 8 bytes.

    The metadata says `format: pt`, which transformers asks for, and nothing else: what a source's metadata says of
    its own bytes need not hold for ours.

    Raises:
        CheckpointError: more tensors than a header may describe.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for info in tensors:
        end = position + info.nbytes
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"{len(tensors)} tensors do not fit into one safetensors header; use a smaller --max-shard-size"
        )
    return _LENGTH.pack(len(text)) + text
