"""fp8_block, compiled: the bytes of lowprec/formats/fp8_block.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.formats.base import Array, Quantized
from lowprec.formats.fp8_block import NAME, Fp8BlockOptions, Rule, Scale, layout

from ._library import Arguments, Kernel

_KERNEL = Kernel(name=NAME, symbol="fp8_block")
_RULES = {Rule.TE: 0, Rule.DEEPGEMM: 1, Rule.DEEPSEEK: 2}  # enum fp8_rule


def _arguments(options: Fp8BlockOptions) -> Arguments:
    return (_RULES[options.rule], int(options.scale is Scale.POW2), *options.block)


def quantize(x: Array, options: Fp8BlockOptions, amax: Array | None = None) -> Quantized:
    """As the reference's."""
    del amax  # no global scale
    return _KERNEL.quantize(x, layout(x.shape, options), _arguments(options))


def quantize_into(x: Array, options: Fp8BlockOptions, out: Quantized, amax: Array | None = None) -> None:
    """`quantize` into arrays of the layout of `x`, which may be parts of larger ones."""
    del amax  # no global scale
    _KERNEL.quantize_into(x, out, layout(x.shape, options), _arguments(options))


def dequantize(quantized: Quantized, options: Fp8BlockOptions, dtype: Any) -> Array:
    """As the reference's."""
    shape = quantized.qdata.shape
    return _KERNEL.dequantize(quantized, shape, layout(shape, options), options.block, dtype)


def dequantize_into(quantized: Quantized, options: Fp8BlockOptions, y: Array) -> None:
    """`dequantize` into an array of a result dtype, which may be part of a larger one."""
    _KERNEL.dequantize_into(quantized, y, layout(y.shape, options), options.block)


def fake_quantize(x: Array, options: Fp8BlockOptions, amax: Array | None = None) -> Array:
    """`dequantize(quantize(x))` in the dtype of `x`, without codes in between."""
    y = np.empty(x.shape, x.dtype)
    fake_quantize_into(x, options, y, amax)
    return y


def fake_quantize_into(x: Array, options: Fp8BlockOptions, y: Array, amax: Array | None = None) -> None:
    """`fake_quantize` into an array of the shape and dtype of `x`."""
    del amax  # no global scale
    layout(x.shape, options)
    _KERNEL.fake_quantize_into(x, y, _arguments(options))
