"""The rules of four formats in plain torch, for finite input and whole blocks: what `torch.compile` is given to fuse.

`tools/gpu_check.py` measures the Triton kernels against them. They state each rule once more, in a third notation, and
are held to the reference's bytes by a test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowprec.formats import numerics as nm

Result = tuple[torch.Tensor, ...]  # qdata, scale and, if there is one, the global scale

E4M3_MAX, E2M1_MAX = float(nm.E4M3_MAX), float(nm.E2M1_MAX)
RECIPROCAL_OF_6, RECIPROCAL_OF_448 = float(nm.RECIPROCAL_OF_6), float(nm.RECIPROCAL_OF_448)
FLT_MAX = float(nm.FLT_MAX)
SIDE = 128  # of an FP8 block


def _over(number: float, x: torch.Tensor) -> torch.Tensor:
    """number / x with one rounding; torch's `/` multiplies a number by the reciprocal."""
    return torch.full_like(x, number) / x


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _e8m0(v: torch.Tensor) -> torch.Tensor:
    """Exponent rounded up, of a normal v >= 0 or 0."""
    bits = v.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()


def _e2m1_pairs(x: torch.Tensor) -> torch.Tensor:
    """Bytes of two nibbles; each threshold is open or closed as the tie goes to the even code."""
    a = x.abs()
    code = (a > 0.25).int() + (a >= 0.75).int() + (a > 1.25).int() + (a >= 1.75).int()
    code = code + (a > 2.5).int() + (a >= 3.5).int() + (a > 5.0).int() + (torch.signbit(x).int() << 3)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def fp8_block(x: torch.Tensor) -> Result:
    """TransformerEngine's rule with FP32 scales, 128x128."""
    *lead, m, k = x.shape
    blocks = x.float().view(*lead, m // SIDE, SIDE, k // SIDE, SIDE)
    amax = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    encode = torch.where(amax == 0, torch.ones_like(amax), _over(E4M3_MAX, amax))
    return _e4m3(blocks * encode).view(x.shape), _over(1.0, encode).view(*lead, m // SIDE, k // SIDE)


def mxfp8(x: torch.Tensor) -> Result:
    """Exponent rounded up."""
    blocks = x.float().unflatten(-1, (-1, nm.MX_BLOCK))
    byte = _e8m0(blocks.abs().amax(dim=-1, keepdim=True) * RECIPROCAL_OF_448)
    multiplier = ((nm.E8M0_MAX - byte) << 23).view(torch.float32)
    return _e4m3(blocks * multiplier).view(x.shape), byte.squeeze(-1).to(torch.uint8)


def mxfp4(x: torch.Tensor) -> Result:
    """scale_rule = "rceil"."""
    blocks = x.float().unflatten(-1, (-1, nm.MX_BLOCK))
    byte = _e8m0(blocks.abs().amax(dim=-1, keepdim=True) * RECIPROCAL_OF_6)
    multiplier = ((nm.E8M0_MAX - byte) << 23).view(torch.float32)
    return _e2m1_pairs(blocks * multiplier).flatten(-2), byte.squeeze(-1).to(torch.uint8)


def nvfp4(x: torch.Tensor) -> Result:
    """One global scale a matrix."""
    blocks = x.float().unflatten(-1, (-1, nm.NVFP4_BLOCK))
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    g = amax.amax(dim=(-3, -2, -1), keepdim=True)
    encode = torch.where(g == 0, torch.ones_like(g), _over(E2M1_MAX * E4M3_MAX, g).clamp(max=FLT_MAX))
    decode = _over(1.0, encode)
    scale = _e4m3(amax * (encode * RECIPROCAL_OF_6))
    multiplier = _over(1.0, scale.float() * decode).clamp(max=FLT_MAX)
    return _e2m1_pairs(blocks * multiplier).flatten(-2), scale.squeeze(-1), decode.view(x.shape[:-2])


FORMULAS: dict[str, Callable[[torch.Tensor], Result]] = {
    "fp8_block": fp8_block,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}
