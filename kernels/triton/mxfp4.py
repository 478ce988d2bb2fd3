"""MXFP4 in Triton: the bytes of `lowprec.formats.mxfp4`, on torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from lowprec.formats.mxfp4 import NAME, Mxfp4Options, ScaleRule, layout

from . import mx
from .launch import Plan, QuantizedTensors, check_input
from .launch import unavailable as unavailable

TAKES_TORCH = True
RULES = {ScaleRule.RCEIL: mx.RCEIL.value, ScaleRule.FLOOR: mx.FLOOR.value, ScaleRule.EVEN: mx.EVEN.value}


def plan_quantize(x: torch.Tensor, options: Mxfp4Options, amax: torch.Tensor | None = None) -> Plan[QuantizedTensors]:
    """The launches of `quantize`."""
    del amax  # no global scale
    return mx.plan_quantize(x, layout(check_input(NAME, x), options), mx.E2M1.value, RULES[options.scale_rule])


def plan_fake_quantize(x: torch.Tensor, options: Mxfp4Options, amax: torch.Tensor | None = None) -> Plan[torch.Tensor]:
    """The launches of `fake_quantize`."""
    del amax
    layout(check_input(NAME, x), options)
    return mx.plan_fake_quantize(x, mx.E2M1.value, RULES[options.scale_rule])


def plan_dequantize(quantized: QuantizedTensors, options: Mxfp4Options, dtype: Any) -> Plan[torch.Tensor]:
    """The launches of `dequantize`."""
    del options
    *rows, half = quantized.qdata.shape
    return mx.plan_dequantize(quantized, (*rows, 2 * half), mx.E2M1.value, dtype)


def quantize(x: torch.Tensor, options: Mxfp4Options, amax: torch.Tensor | None = None) -> QuantizedTensors:
    """[.., M, K] of any strides -> bytes of two nibbles [.., M, K/2] and E8M0 bytes [.., M, K/32]."""
    return plan_quantize(x, options, amax).run(x)


def fake_quantize(x: torch.Tensor, options: Mxfp4Options, amax: torch.Tensor | None = None) -> torch.Tensor:
    """dequantize(quantize(x)) in the dtype of `x`, in one pass over memory."""
    return plan_fake_quantize(x, options, amax).run(x)


def dequantize(quantized: QuantizedTensors, options: Mxfp4Options, dtype: Any) -> torch.Tensor:
    """q * 2^(byte - 127), then one rounding to `dtype`: [.., M, K]."""
    return plan_dequantize(quantized, options, dtype).run(quantized.qdata)
