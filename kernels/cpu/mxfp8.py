"""mxfp8, compiled: the bytes of lowprec/formats/mxfp8.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.formats.base import Array, Quantized
from lowprec.formats.mxfp8 import NAME, Mxfp8Options, layout

from ._library import Kernel

_KERNEL = Kernel(name=NAME, symbol="mx")
_E4M3, _RCEIL = 0, 0  # enum mx_element, enum mx_rule


def quantize(x: Array, options: Mxfp8Options, amax: Array | None = None) -> Quantized:
    """As the reference's."""
    del amax  # no global scale
    return _KERNEL.quantize(x, layout(x.shape, options), (_E4M3, _RCEIL))


def quantize_into(x: Array, options: Mxfp8Options, out: Quantized, amax: Array | None = None) -> None:
    """`quantize` into arrays of the layout of `x`, which may be parts of larger ones."""
    del amax  # no global scale
    _KERNEL.quantize_into(x, out, layout(x.shape, options), (_E4M3, _RCEIL))


def dequantize(quantized: Quantized, options: Mxfp8Options, dtype: Any) -> Array:
    """As the reference's."""
    shape = quantized.qdata.shape
    return _KERNEL.dequantize(quantized, shape, layout(shape, options), (_E4M3,), dtype)


def dequantize_into(quantized: Quantized, options: Mxfp8Options, y: Array) -> None:
    """`dequantize` into an array of a result dtype, which may be part of a larger one."""
    _KERNEL.dequantize_into(quantized, y, layout(y.shape, options), (_E4M3,))


def fake_quantize(x: Array, options: Mxfp8Options, amax: Array | None = None) -> Array:
    """`dequantize(quantize(x))` in the dtype of `x`, without codes in between."""
    y = np.empty(x.shape, x.dtype)
    fake_quantize_into(x, options, y, amax)
    return y


def fake_quantize_into(x: Array, options: Mxfp8Options, y: Array, amax: Array | None = None) -> None:
    """`fake_quantize` into an array of the shape and dtype of `x`."""
    del amax  # no global scale
    layout(x.shape, options)
    _KERNEL.fake_quantize_into(x, y, (_E4M3, _RCEIL))
