"""nvfp4, compiled: the bytes of lowprec/formats/nvfp4.py.

Two passes over a tensor: the global amax, then everything else with that amax given. A caller that reads a tensor in
stripes makes them itself: `global_amax` of each stripe, the maximum, then `quantize_into` stripe by stripe.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.errors import FormatError
from lowprec.formats.base import Array, Quantized, check_input
from lowprec.formats.nvfp4 import NAME, TILE, FourOverSix, Nvfp4Options, Outer, layout

from . import _library
from ._library import Arguments, Kernel

_KERNEL = Kernel(name=NAME, symbol="nvfp4")
_CHOICES = {None: 0, FourOverSix.MAE: 1, FourOverSix.MSE: 2}  # enum nv_choice


def _arguments(options: Nvfp4Options) -> Arguments:
    return (int(options.block == TILE), _CHOICES[options.four_over_six], options.e4m3_max)


def global_amax(x: Array, options: Nvfp4Options) -> Array:
    """The global amax, NaN ignored: float32 [..] a matrix, [.., M] a row. 0 for an empty one."""
    check_input(NAME, x)
    rows = _library.row_amax(x)
    return rows if options.outer is Outer.ROW else np.asarray(rows.max(axis=-1, initial=0.0))


def quantize(x: Array, options: Nvfp4Options, amax: Array | None = None) -> Quantized:
    """As the reference's."""
    shapes = layout(x.shape, options)
    amax = global_amax(x, options) if amax is None else _like_outer(amax, x, options)
    out = _KERNEL.quantize(x, shapes, _arguments(options), amax)
    _fill_global_scale(out, amax, options)
    return out


def quantize_into(x: Array, options: Nvfp4Options, out: Quantized, amax: Array | None = None) -> None:
    """`quantize` into arrays of the layout of `x`, which may be parts of larger ones."""
    shapes = layout(x.shape, options)
    amax = global_amax(x, options) if amax is None else _like_outer(amax, x, options)
    _KERNEL.quantize_into(x, out, shapes, _arguments(options), amax)
    _fill_global_scale(out, amax, options)


def dequantize(quantized: Quantized, options: Nvfp4Options, dtype: Any) -> Array:
    """As the reference's."""
    *rows, packed = quantized.qdata.shape
    shape = (*rows, 2 * packed)
    return _KERNEL.dequantize(quantized, shape, layout(shape, options), (), dtype)


def dequantize_into(quantized: Quantized, options: Nvfp4Options, y: Array) -> None:
    """`dequantize` into an array of a result dtype, which may be part of a larger one."""
    _KERNEL.dequantize_into(quantized, y, layout(y.shape, options), ())


def fake_quantize(x: Array, options: Nvfp4Options, amax: Array | None = None) -> Array:
    """`dequantize(quantize(x))` in the dtype of `x`, without codes in between."""
    y = np.empty(x.shape, x.dtype)
    fake_quantize_into(x, options, y, amax)
    return y


def fake_quantize_into(x: Array, options: Nvfp4Options, y: Array, amax: Array | None = None) -> None:
    """`fake_quantize` into an array of the shape and dtype of `x`."""
    layout(x.shape, options)
    amax = global_amax(x, options) if amax is None else _like_outer(amax, x, options)
    _KERNEL.fake_quantize_into(x, y, _arguments(options), amax)


def _like_outer(amax: Array, x: Array, options: Nvfp4Options) -> Array:
    """A given amax as float32. Raises FormatError unless it has the shape of the global scale."""
    shape = x.shape[:-1] if options.outer is Outer.ROW else x.shape[:-2]
    amax = np.asarray(amax, dtype=np.float32)
    if amax.shape != shape:
        raise FormatError(f"{NAME}: amax has shape {list(amax.shape)}, it must be {list(shape)}")
    return amax


def _fill_global_scale(out: Quantized, amax: Array, options: Nvfp4Options) -> None:
    assert out.global_scale is not None, "the layout has one"
    out.global_scale[...] = _library.nvfp4_global_scale(amax, options.e4m3_max)
