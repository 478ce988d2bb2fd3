"""Checkpoint folders for tests: small real ones, rewritten ones, and whole trees as bytes. Independent of lowprec."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Change = Callable[[dict[str, Array]], dict[str, Array] | None]

MEGATRON = Path(__file__).parent / "data" / "megatron"
QWEN3, QWEN3_MOE, DEEPSEEK_V3 = (MEGATRON / name / "hf" for name in ("qwen3", "qwen3_moe", "deepseek_v3"))
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative name; folders as names that end in a slash."""
    return {
        str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def load(path: Path) -> dict[str, Array]:
    """The tensors of one safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def load_folder(folder: Path) -> dict[str, Array]:
    """The tensors of all safetensors files of a folder."""
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = load(path)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def encode(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file of the tensors in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        end = position + array.nbytes
        entry = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [position, end]}
        header[name], position = entry, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values())


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    """A file with any header: an object as JSON, or text as it is."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def copy(source: Path, target: Path, change: Change | None = None) -> Path:
    """A copy of a single-file checkpoint, its tensors changed (in place, or to what `change` returns)."""
    shutil.copytree(source, target)
    if change is not None:
        tensors = {name: array.copy() for name, array in load(target / MODEL).items()}
        (target / MODEL).write_bytes(encode(change(tensors) or tensors))
    return target


def split(source: Path, target: Path, shard_of: Callable[[str], int], shards: int) -> Path:
    """A copy of a single-file checkpoint in several files with an index."""
    shutil.copytree(source, target)
    tensors = load(target / MODEL)
    (target / MODEL).unlink()
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    for number, file in enumerate(names):
        (target / file).write_bytes(encode({n: array for n, array in tensors.items() if shard_of(n) == number}))
    weight_map = {name: names[shard_of(name)] for name in tensors}
    total = sum(array.nbytes for array in tensors.values())
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return target


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
