"""mxfp4, compiled: the bytes of lowprec/formats/mxfp4.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.formats.base import Array, Quantized
from lowprec.formats.mxfp4 import NAME, Mxfp4Options, ScaleRule, layout

from ._library import Kernel

_KERNEL = Kernel(name=NAME, symbol="mx")
_E2M1 = 1  # enum mx_element
_RULES = {ScaleRule.RCEIL: 0, ScaleRule.FLOOR: 1, ScaleRule.EVEN: 2}  # enum mx_rule


def quantize(x: Array, options: Mxfp4Options, amax: Array | None = None) -> Quantized:
    """As the reference's."""
    del amax  # no global scale
    return _KERNEL.quantize(x, layout(x.shape, options), (_E2M1, _RULES[options.scale_rule]))


def quantize_into(x: Array, options: Mxfp4Options, out: Quantized, amax: Array | None = None) -> None:
    """`quantize` into arrays of the layout of `x`, which may be parts of larger ones."""
    del amax  # no global scale
    _KERNEL.quantize_into(x, out, layout(x.shape, options), (_E2M1, _RULES[options.scale_rule]))


def dequantize(quantized: Quantized, options: Mxfp4Options, dtype: Any) -> Array:
    """As the reference's."""
    *rows, packed = quantized.qdata.shape
    shape = (*rows, 2 * packed)
    return _KERNEL.dequantize(quantized, shape, layout(shape, options), (_E2M1,), dtype)


def dequantize_into(quantized: Quantized, options: Mxfp4Options, y: Array) -> None:
    """`dequantize` into an array of a result dtype, which may be part of a larger one."""
    _KERNEL.dequantize_into(quantized, y, layout(y.shape, options), (_E2M1,))


def fake_quantize(x: Array, options: Mxfp4Options, amax: Array | None = None) -> Array:
    """`dequantize(quantize(x))` in the dtype of `x`, without codes in between."""
    y = np.empty(x.shape, x.dtype)
    fake_quantize_into(x, options, y, amax)
    return y


def fake_quantize_into(x: Array, options: Mxfp4Options, y: Array, amax: Array | None = None) -> None:
    """`fake_quantize` into an array of the shape and dtype of `x`."""
    del amax  # no global scale
    layout(x.shape, options)
    _KERNEL.fake_quantize_into(x, y, (_E2M1, _RULES[options.scale_rule]))
