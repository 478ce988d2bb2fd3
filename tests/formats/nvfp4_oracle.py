"""NVFP4 once more, in another style: float64 operations on one block at a time, each rounded to float32 once.

A float64 has more than twice the bits of a float32, so rounding the float64 result of one operation on
float32 operands gives the correctly rounded float32 result (+, -, *, /).
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from bitwise import Array

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLT_MAX = float(np.finfo(np.float32).max)


class Result(NamedTuple):
    """Codes [blocks, 16], block scales [blocks] as E4M3 bytes."""

    codes: Array
    scale: Array


def fl(x: Array) -> Array:
    """Round to float32, keep computing in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def e4m3(x: Array) -> Array:
    """The E4M3 byte."""
    return np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_value(byte: Array) -> Array:
    return byte.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def e2m1(x: Array) -> Array:
    """The E2M1 nibble: the nearest of the eight magnitudes, of two equally near ones that with the even code."""
    distance = np.abs(np.minimum(np.abs(x), 6.0)[..., None] - E2M1)
    nearest = distance.min(axis=-1, keepdims=True)
    tied = distance == nearest
    even = np.array([1, 0] * 4, bool)
    best = np.where(tied.sum(axis=-1) == 2, (tied & even).argmax(axis=-1), tied.argmax(axis=-1))
    return (best + 8 * np.signbit(x)).astype(np.uint8)


def encode_scale(g: Array, largest: float) -> Array:
    """S of a positive finite G."""
    return np.minimum(fl(6.0 * largest / g), FLT_MAX)


def _elements(x: Array, scale: Array, decode: Array) -> Array:
    with np.errstate(divide="ignore"):
        multiplier = np.minimum(fl(1.0 / fl(e4m3_value(scale) * decode)), FLT_MAX)
    return e2m1(fl(x * multiplier[:, None]))


def plain(x: Array, g: Array, amax: Array | None = None) -> Result:
    """x [blocks, 16] and G [blocks] in float64; `amax` [blocks] where it is not the block's own (tiles)."""
    s = encode_scale(g, 448.0)
    a = np.abs(x).max(axis=-1) if amax is None else amax
    sixth = fl(1.0 / 6.0)
    scale = e4m3(np.minimum(fl(a * fl(s * sixth)), FLT_MAX))
    return Result(_elements(x, scale, fl(1.0 / s)), scale)


def candidates(x: Array, g: Array, largest: float, amax: Array | None = None) -> tuple[Result, Result]:
    """(map to 4, map to 6)."""
    s = encode_scale(g, largest)
    a = np.abs(x).max(axis=-1) if amax is None else amax
    base = fl(fl(a / 6.0) * s)
    four, six = e4m3(fl(base * 1.5)), e4m3(base)
    decode = fl(1.0 / s)
    return Result(_elements(x, four, decode), four), Result(_elements(x, six, decode), six)


def errors(x: Array, g: Array, largest: float, result: Result, error: str) -> Array:
    """The error of each block, added up element after element."""
    total = np.zeros(len(x))
    for i in range(16):
        code = result.codes[:, i]
        q = np.where(code & 8, -1.0, 1.0) * E2M1[code & 7]
        value = fl(fl(fl(q * e4m3_value(result.scale)) * g) / (6.0 * largest))
        d = fl(value - x[:, i])
        total = fl(total + (np.abs(d) if error == "mae" else fl(d * d)))
    return total


def four_over_six(x: Array, g: Array, largest: float, error: str, *, tile: bool = False) -> Result:
    """x [blocks, 16]; with `tile`, every 16 blocks in a row are the rows of one 16x16 tile."""
    amax = np.repeat(np.abs(x).reshape(-1, 256).max(axis=-1), 16) if tile else None
    four, six = candidates(x, g, largest, amax)
    e4, e6 = (errors(x, g, largest, result, error) for result in (four, six))
    if tile:
        e4, e6 = (np.repeat(_tree(e.reshape(-1, 16)), 16) for e in (e4, e6))
    pick = e4 < e6
    return Result(np.where(pick[:, None], four.codes, six.codes), np.where(pick, four.scale, six.scale))


def _tree(rows: Array) -> Array:
    """e[i] += e[i + 8], then + 4, + 2, + 1."""
    e = [rows[:, i] for i in range(16)]
    for step in (8, 4, 2, 1):
        for i in range(step):
            e[i] = fl(e[i] + e[i + step])
    return e[0]
