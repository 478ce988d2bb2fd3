"""Bytes equal, or a message that shows the first place where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
F16 = np.dtype(np.float16)

_SAFETENSORS = {"F32": F32, "BF16": BF16, "U8": np.dtype(np.uint8)}


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of a small file, read without the package under test."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            out[name] = np.frombuffer(data[begin:end], _SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    return out


def bits(x: Array) -> Array:
    """The array's bit patterns."""
    return np.asarray(x, order="C").view(f"u{x.dtype.itemsize}")


def assert_same_bits(got: Array, want: Array, x: Array | None = None, what: str = "array") -> None:
    """Shape, dtype and every bit. `x`: the input, of the same shape, shown at the first mismatch."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    differ = np.asarray(bits(got) != bits(want))
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        width = 2 * got.dtype.itemsize
        text = f"{what}: {int(differ.sum())} of {differ.size} differ, first at {at}: "
        text += f"got {int(bits(got)[at]):0{width}x}, expected {int(bits(want)[at]):0{width}x}"
        if x is not None:
            text += f", input {int(bits(x)[at]):0{2 * x.dtype.itemsize}x} ({float(x[at])!r})"
        raise AssertionError(text)


def f32(hex32: str) -> np.float32:
    """The float32 of a bit pattern."""
    return np.uint32(int(hex32, 16)).view(np.float32)


def bf16(words: str) -> Array:
    """Blank-separated bfloat16 bit patterns."""
    return np.array([int(word, 16) for word in words.split()], dtype=np.uint16).view(BF16)


def nx(value: float | np.floating[Any]) -> np.float32:
    """The next float32 above."""
    return np.nextafter(np.float32(value), np.float32(np.inf))


def pv(value: float | np.floating[Any]) -> np.float32:
    """The next float32 below."""
    return np.nextafter(np.float32(value), np.float32(-np.inf))


def below(amax: Any, count: int) -> Array:
    """`count` bfloat16 values of one binade and both signs, none larger than `amax` (positive bfloat16)."""
    top = int(np.asarray(amax, BF16).view(np.uint16))
    words = top - (np.arange(count) * 37) % 256
    return (words | np.where(np.arange(count) % 2, 0x8000, 0)).astype(np.uint16).view(BF16)
