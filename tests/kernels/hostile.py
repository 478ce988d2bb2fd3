"""Arrays that tell a kernel from the reference, and the comparison of every byte."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bitwise import BF16, F16, F32, Array, assert_same_bits

from lowprec.errors import BackendError
from lowprec.formats import BUILTIN, get_format
from lowprec.formats.base import Format, Quantized, Shape
from lowprec.qtensor import like, to_numpy

DTYPES = (F32, F16, BF16)
FOLDER = Path(__file__).parents[2] / "kernels"
Random = np.random.Generator


# ---- inputs --------------------------------------------------------------------------------------------


def patterns(random: Random, shape: Shape, dtype: np.dtype) -> Array:
    """Every bit pattern is as likely as any other: all magnitudes, subnormals, -0, Inf, quiet and signalling NaN."""
    integer = np.dtype(f"u{dtype.itemsize}")
    return random.integers(0, np.iinfo(integer).max, shape, integer, endpoint=True).view(dtype)


def finite_patterns(random: Random, shape: Shape, dtype: np.dtype) -> Array:
    """The same without Inf and NaN, which would spoil the amax of most blocks."""
    x = patterns(random, shape, dtype)
    return np.where(np.isfinite(x.astype(np.float32)), x, dtype.type(-0.0))


def weights(random: Random, shape: Shape, dtype: np.dtype) -> Array:
    """Like a trained layer: rows of different spread, a few large elements."""
    x = random.standard_normal(shape, np.float32) * np.float32(0.02)
    x *= np.exp(random.standard_normal((*shape[:-1], 1), np.float32))
    x[random.random(shape) < 1 / 500] *= 15
    return x.astype(dtype)


def magnitudes(random: Random, shape: Shape, dtype: np.dtype) -> Array:
    """Rows of all magnitudes that the dtype has, each row within some binades."""
    info = np.finfo(np.float32) if dtype == F32 else np.finfo(np.float16) if dtype == F16 else np.finfo(np.float32)
    exponent = random.integers(info.minexp - 10, info.maxexp, (*shape[:-1], 1))
    x = random.uniform(-2, 2, shape) * np.exp2(exponent + random.integers(-6, 1, shape))
    top = float(np.finfo(dtype).max) if dtype != BF16 else float(np.float32(3.3895314e38))
    return np.clip(x, -top, top).astype(np.float32).astype(dtype)


def ties(random: Random, shape: Shape, dtype: np.dtype) -> Array:
    """Few mantissa bits and exact powers of two, so that scales are exact and elements lie on ties."""
    x = random.integers(-64, 65, shape).astype(np.float32) / 8
    x *= np.exp2(random.integers(-3, 3, (*shape[:-1], 1)).astype(np.float32))
    return x.astype(dtype)


def sparse(random: Random, shape: Shape, dtype: np.dtype) -> Array:
    """Mostly zeros of both signs: whole zero blocks, blocks with one element, which may be NaN, Inf or subnormal."""
    x = np.where(random.random(shape) < 0.5, np.float32(0.0), np.float32(-0.0)).astype(dtype)
    return np.where(random.random(shape) < 0.02, patterns(random, shape, dtype), x)


KINDS: tuple[Callable[[Random, Shape, np.dtype], Array], ...] = (
    patterns,
    finite_patterns,
    weights,
    magnitudes,
    ties,
    sparse,
)


# ---- kernels -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One format of one backend, called with numpy arrays, whatever it takes."""

    backend: str
    format: Format
    module: Any

    def quantize(self, x: Array, options: Any, amax: Array | None = None) -> Quantized:
        out = self.module.quantize(self._give(x), options, None if amax is None else self._give(amax))
        return Quantized(*(None if array is None else to_numpy(array) for array in out))

    def dequantize(self, quantized: Quantized, options: Any, dtype: np.dtype) -> Array:
        arrays = Quantized(*(None if array is None else self._give(array) for array in quantized))
        return to_numpy(self.module.dequantize(arrays, options, dtype))

    def fake_quantize(self, x: Array, options: Any, amax: Array | None = None) -> Array:
        return to_numpy(self.module.fake_quantize(self._give(x), options, None if amax is None else self._give(amax)))

    def _give(self, x: Array) -> Any:
        """The array as the module takes it: numpy's, or a torch tensor on the GPU if there is one."""
        if not getattr(self.module, "TAKES_TORCH", False):
            return x
        torch = importlib.import_module("torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return like(np.asarray(x, order="C"), torch.empty(0, device=device))


def found() -> list[tuple[str, str]]:
    """(backend, format) of every file kernels/<backend>/<format>.py."""
    return sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.py") if path.stem in BUILTIN)


def load(backend: str, format_name: str) -> Kernel:
    """Raises BackendError or ImportError where the backend does not work here."""
    module = importlib.import_module(f"lowprec.kernels.{backend}.{format_name}")
    why = getattr(module, "unavailable", lambda: None)()
    if why:
        raise BackendError(why)
    return Kernel(backend=backend, format=get_format(format_name), module=module)


# ---- comparison ----------------------------------------------------------------------------------------


def assert_same_as_reference(kernel: Kernel, x: Array, options: Any, amax: Array | None = None) -> int:
    """Codes, scales, global scale, decoded values in all dtypes, fake quantization; returns the bytes compared."""
    want = kernel.format.quantize(x, options, amax)
    got = kernel.quantize(x, options, amax)
    assert_same_bits(got.scale, want.scale, None, "scale")
    assert_same_bits(kernel.format.codes(got.qdata), kernel.format.codes(want.qdata), x, "codes")
    assert_same_bits(got.qdata, want.qdata, None, "qdata")
    if want.global_scale is None:
        assert got.global_scale is None
    else:
        assert_same_bits(got.global_scale, want.global_scale, None, "global scale")
    compared = sum(array.nbytes for array in want if array is not None)
    for dtype in DTYPES:
        compared += assert_same_values(kernel, want, options, dtype)
    if hasattr(kernel.module, "fake_quantize"):
        values = kernel.format.dequantize(want, options, x.dtype)
        assert_same_bits(*plain(kernel, kernel.fake_quantize(x, options, amax), values), x, "fake-quantized values")
        compared += values.nbytes
    return compared


def assert_same_values(kernel: Kernel, quantized: Quantized, options: Any, dtype: np.dtype) -> int:
    """Decoded values; returns the bytes compared."""
    want = kernel.format.dequantize(quantized, options, dtype)
    got = kernel.dequantize(quantized, options, dtype)
    assert_same_bits(*plain(kernel, got, want), None, f"{dtype.name} values")
    return int(want.nbytes)


def plain(kernel: Kernel, got: Array, want: Array) -> tuple[Array, Array]:
    """Both with one NaN for all NaN: its sign and payload are the processor's. Compiled code here has numpy's."""
    if kernel.backend == "cpu":
        return got, want
    return tuple(
        np.where(np.isnan(values.astype(np.float32)), values.dtype.type(np.nan), values) for values in (got, want)
    )
