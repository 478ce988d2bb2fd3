"""int4_group, compiled: the bytes of lowprec/formats/int4_group.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.formats.base import Array, Quantized
from lowprec.formats.int4_group import CODES_PER_WORD, NAME, Int4GroupOptions, Rule, layout

from ._library import Arguments, Kernel

_KERNEL = Kernel(name=NAME, symbol="int4_group")
_TWICE_THE_DIVISOR = {Rule.AMAX7: 14, Rule.AMAX7_5: 15}


def _arguments(options: Int4GroupOptions) -> Arguments:
    return (_TWICE_THE_DIVISOR[options.rule], options.group)


def quantize(x: Array, options: Int4GroupOptions, amax: Array | None = None) -> Quantized:
    """As the reference's."""
    del amax  # no global scale
    return _KERNEL.quantize(x, layout(x.shape, options), _arguments(options))


def quantize_into(x: Array, options: Int4GroupOptions, out: Quantized, amax: Array | None = None) -> None:
    """`quantize` into arrays of the layout of `x`, which may be parts of larger ones."""
    del amax  # no global scale
    _KERNEL.quantize_into(x, out, layout(x.shape, options), _arguments(options))


def dequantize(quantized: Quantized, options: Int4GroupOptions, dtype: Any) -> Array:
    """As the reference's."""
    *rows, words = quantized.qdata.shape
    shape = (*rows, CODES_PER_WORD * words)
    return _KERNEL.dequantize(quantized, shape, layout(shape, options), (options.group,), dtype)


def dequantize_into(quantized: Quantized, options: Int4GroupOptions, y: Array) -> None:
    """`dequantize` into an array of a result dtype, which may be part of a larger one."""
    _KERNEL.dequantize_into(quantized, y, layout(y.shape, options), (options.group,))


def fake_quantize(x: Array, options: Int4GroupOptions, amax: Array | None = None) -> Array:
    """`dequantize(quantize(x))` in the dtype of `x`, without codes in between."""
    y = np.empty(x.shape, x.dtype)
    fake_quantize_into(x, options, y, amax)
    return y


def fake_quantize_into(x: Array, options: Int4GroupOptions, y: Array, amax: Array | None = None) -> None:
    """`fake_quantize` into an array of the shape and dtype of `x`."""
    del amax  # no global scale
    layout(x.shape, options)
    _KERNEL.fake_quantize_into(x, y, _arguments(options))
