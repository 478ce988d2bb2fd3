"""nvfp4: E2M1 elements, one E4M3 scale for 16 elements of a row (or a 16x16 tile), one FP32 global scale.

    S  = fl(6 * e4m3_max / G)          G: the global amax, of a matrix or of a row
    sb = e4m3(fl(A * fl(S * fl(1/6)))) A: the block's amax
    q  = e2m1(fl(x * fl(1 / fl(sb * fl(1/S)))))
    decoded: fl(fl(sb * global_scale) * q), global_scale = fl(1/S)

The order of these operations decides bits: five other orders in use give other block scales or codes.
`four_over_six` tries for each block a scale that maps its amax to 6 and one that maps it to 4, and keeps
the one with the smaller error (4 only if it is strictly smaller).

Agrees with TransformerEngine (common/cast/nvfp4/core_nvfp4.cuh, quantize_transpose_nvfp4.cuh,
quantize_4over6_nvfp4.cuh) and FlashInfer's exact mode.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import FormatError
from . import numerics as nm
from .base import Array, ArraySpec, Format, Layout, Options, Quantized, Shape, check_input, check_shape

NAME = "nvfp4"
TILE = (nm.NVFP4_BLOCK, nm.NVFP4_BLOCK)
BLOCKS = ((1, nm.NVFP4_BLOCK), TILE)


class Outer(enum.StrEnum):
    """What shares one global scale."""

    TENSOR = "tensor"
    ROW = "row"


class FourOverSix(enum.StrEnum):
    """The error that chooses between map-to-4 and map-to-6: sum of |d| or of d * d."""

    MAE = "mae"
    MSE = "mse"


@dataclass(frozen=True, kw_only=True)
class Nvfp4Options(Options):
    """`outer`: one global scale a matrix or a row; `block`: (1, 16) or (16, 16); `e4m3_max`: 448 or 256."""

    format: ClassVar[str] = NAME
    outer: Outer = Outer.TENSOR
    block: tuple[int, int] = (1, nm.NVFP4_BLOCK)
    four_over_six: FourOverSix | None = None
    e4m3_max: int = int(nm.E4M3_MAX)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block not in BLOCKS:
            raise FormatError(f"{NAME}: block cannot be {list(self.block)} (known: [1, 16], [16, 16])")
        if self.outer is Outer.ROW and self.block == TILE:
            raise FormatError(f"{NAME}: outer = 'row' cannot go with block = [16, 16], use outer = 'tensor'")
        if self.e4m3_max not in nm.NVFP4_E4M3_MAXIMA:
            raise FormatError(f"{NAME}: e4m3_max cannot be {self.e4m3_max} (known: 256, 448)")
        if self.e4m3_max != nm.E4M3_MAX and self.four_over_six is None:
            raise FormatError(f"{NAME}: e4m3_max = {self.e4m3_max} needs four_over_six = 'mae' or 'mse'")

    @property
    def row_alignment(self) -> int:
        """A cut along M keeps whole tiles together."""
        return self.block[0]

    @property
    def column_alignment(self) -> int:
        """A cut along K keeps whole blocks together."""
        return self.block[1]


def layout(shape: Shape, options: Nvfp4Options) -> Layout:
    """qdata [.., M, K/2] bytes; scale [.., M, K/16] E4M3 (tiles: repeated over their 16 rows); global_scale.

    global_scale is float32, [..] (one a matrix) or [.., M] (one a row). K, and M for tiles, are multiples of 16.
    """
    check_shape(NAME, shape, rows=options.block[0], columns=nm.NVFP4_BLOCK)
    *rows, k = shape
    outer = shape[:-1] if options.outer is Outer.ROW else shape[:-2]
    return Layout(
        ArraySpec((*rows, k // 2), nm.UINT8),
        ArraySpec((*rows, k // nm.NVFP4_BLOCK), nm.FLOAT8_E4M3FN),
        ArraySpec(outer, nm.FLOAT32),
    )


def global_amax(x: Array, options: Nvfp4Options) -> nm.F32:
    """The global amax G, NaN ignored: float32 [..] a matrix, [.., M] a row. 0 for an empty one."""
    check_input(NAME, x)
    *lead, m, k = x.shape
    if x.size == 0:
        return np.zeros((*lead, m) if options.outer is Outer.ROW else lead, dtype=np.float32)
    if options.outer is Outer.ROW:
        return nm.block_amax(x, (1, k))[..., 0]
    return nm.block_amax(x, (m, k))[..., 0, 0]


def _encode_scale(amax: nm.F32, options: Nvfp4Options) -> nm.F32:
    """S, the multiplier that brings the largest block scale to e4m3_max."""
    scale = np.minimum(np.float32(nm.E2M1_MAX * options.e4m3_max) / amax, nm.FLT_MAX)
    return np.where((amax == 0) | (scale == 0), np.float32(1.0), scale)


def _multiplier(block_scale: nm.U8, global_scale: nm.F32) -> nm.F32:
    """What the elements of a block are multiplied by; FLT_MAX for a block scale of 0."""
    out: nm.F32 = np.minimum(np.float32(1.0) / (nm.decode_e4m3(block_scale) * global_scale), nm.FLT_MAX)
    return out


@np.errstate(all="ignore")
def quantize(x: Array, options: Nvfp4Options, amax: Array | None = None) -> Quantized:
    """[.., M, K] -> bytes of two nibbles [.., M, K/2], E4M3 [.., M, K/16], float32 global scale [..] or [.., M].

    `amax`: the global amax G to use instead of the tensor's own (partners share one). A zero block has scale 0
    and codes 0; a block whose scale underflows to 0 has codes +-6 and decodes to 0. A zero tensor, and one
    with Inf, has S = 1. NaN is ignored by both amaxes and has code 0x7.
    """
    check_input(NAME, x)
    layout(x.shape, options)
    g = global_amax(x, options) if amax is None else amax
    encode = _encode_scale(g, options)
    global_scale = np.float32(1.0) / encode
    # One value a matrix or a row, against blocks [.., M, G].
    wide = (..., None) if options.outer is Outer.ROW else (..., None, None)
    block_amax = nm.block_amax(x, options.block)
    if options.four_over_six is None:
        scale = nm.encode_e4m3(np.minimum(block_amax * (encode * nm.RECIPROCAL_OF_6)[wide], nm.FLT_MAX))
        scale = np.repeat(scale, options.block[0], axis=-2)
    else:
        base = block_amax / nm.E2M1_MAX * encode[wide]
        scale = _choose_scale(x, base, g[wide], global_scale[wide], options)
    multiplier = _multiplier(scale, global_scale[wide])
    scaled = x.astype(np.float32) * nm.spread(multiplier, (1, nm.NVFP4_BLOCK), x.shape)
    qdata = nm.pack_nibbles(nm.encode_e2m1(scaled))
    return Quantized(qdata, scale.view(nm.FLOAT8_E4M3FN), np.asarray(global_scale, dtype=np.float32))


def _choose_scale(x: Array, base: nm.F32, g: nm.F32, global_scale: nm.F32, options: Nvfp4Options) -> nm.U8:
    """Four over six: the better of two E4M3 scales for each block, repeated over a tile's rows: [.., M, G]."""
    rows = options.block[0]
    six = nm.encode_e4m3(np.minimum(base, nm.E4M3_MAX))
    four = nm.encode_e4m3(np.minimum(base * nm.FOUR_OVER_SIX, nm.E4M3_MAX))
    six, four = np.repeat(six, rows, axis=-2), np.repeat(four, rows, axis=-2)
    blocks = x.astype(np.float32).reshape(*six.shape, nm.NVFP4_BLOCK)
    error_six = _error(blocks, six, g, global_scale, options)
    error_four = _error(blocks, four, g, global_scale, options)
    if rows > 1:
        error_six, error_four = _sum_tile(error_six), _sum_tile(error_four)
    return np.where(error_four < error_six, four, six)


def _error(blocks: nm.F32, scale: nm.U8, g: nm.F32, global_scale: nm.F32, options: Nvfp4Options) -> nm.F32:
    """The error of each block [.., M, G, 16] under a scale: [.., M, G]. Summed strictly in order, no FMA."""
    codes = nm.encode_e2m1(blocks * _multiplier(scale, global_scale)[..., None])
    q = nm.decode_e2m1(codes)
    q *= nm.decode_e4m3(scale)[..., None]
    q *= g[..., None]
    q /= nm.E2M1_MAX * np.float32(options.e4m3_max)
    q -= blocks
    term = np.abs(q) if options.four_over_six is FourOverSix.MAE else q * q
    total = np.zeros(scale.shape, dtype=np.float32)
    for i in range(nm.NVFP4_BLOCK):
        total += term[..., i]
    return total


def _sum_tile(error: nm.F32) -> nm.F32:
    """The sum of the 16 row errors of each tile as a binary tree, repeated over its rows: [.., M, G]."""
    *lead, m, g = error.shape
    part = error.reshape(*lead, m // nm.NVFP4_BLOCK, nm.NVFP4_BLOCK, g)
    while part.shape[-2] > 1:
        half = part.shape[-2] // 2
        part = part[..., :half, :] + part[..., half:, :]
    return np.repeat(part[..., 0, :], nm.NVFP4_BLOCK, axis=-2)


@np.errstate(all="ignore")
def dequantize(quantized: Quantized, options: Nvfp4Options, dtype: Any) -> Array:
    """fl(fl(sb * global_scale) * q) in float32 as ModelOpt does, then one rounding to `dtype`: [.., M, K]."""
    if quantized.global_scale is None:
        raise FormatError(f"{NAME}: global_scale is missing, pass all three arrays")
    wide = (..., None) if options.outer is Outer.ROW else (..., None, None)
    q = nm.decode_e2m1_packed(quantized.qdata)
    factor = nm.decode_e4m3(quantized.scale.view(np.uint8)) * quantized.global_scale[wide]
    return (nm.spread(factor, (1, nm.NVFP4_BLOCK), q.shape) * q).astype(dtype)


def codes(qdata: Array) -> nm.U8:
    """One nibble an element: [.., M, K]."""
    return nm.unpack_nibbles(qdata)


def describe(options: Nvfp4Options) -> dict[str, Any]:
    """Every rule that decides a bit."""
    tile = options.block == TILE
    rules: dict[str, Any] = {
        "element": nm.E2M1_RULES,
        "block_shape": list(options.block),
        "ragged_edge": f"refused: K {'and M ' if tile else ''}must be a multiple of 16",
        "amax": "float32, exact, of the input's own dtype",
        "amax_floor": 0.0,
        "global_amax": f"one a {'matrix' if options.outer is Outer.TENSOR else 'row'}, or given",
        "global_scale_codec": "float32, fl(1/S), the decode multiplier",
        "global_scale": f"S = min(fl(6 * {options.e4m3_max} / G), FLT_MAX); 1 if G or S is 0",
        "zero_block": "scale 0, codes 0 with the element's sign",
        "scale_codec": {**nm.E4M3_RULES, "layout": "repeated over a tile's rows" if tile else "one a block"},
        "scale": "e4m3(min(fl(A * fl(S * fl(1/6))), FLT_MAX))",
        "scale_underflow": "scale 0, codes +-6",
        "encode": "fl(x * min(fl(1 / fl(sb * fl(1/S))), FLT_MAX))",
        "nonfinite_amax": "NaN ignored; Inf gives S = 1",
        "packing": nm.NIBBLE_PACKING,
        "decode": "fl(fl(sb * global_scale) * q), then one rounding to the result's dtype",
        "source": "TransformerEngine: common/cast/nvfp4/core_nvfp4.cuh",
    }
    if options.four_over_six is not None:
        mae = options.four_over_six is FourOverSix.MAE
        rules |= {
            "scale": "base = fl(fl(A / 6) * S); sb6 = e4m3(min(base, 448)), sb4 = e4m3(min(fl(base * 1.5), 448))",
            "choice": "sb4 if its error is strictly smaller, else sb6",
            "error_term": "|d|" if mae else "fl(d * d)",
            "error_difference": f"d = fl(fl(fl(fl(q * sb) * G) / {int(nm.E2M1_MAX) * options.e4m3_max}) - x)",
            "error_sum": "float32, in element order, no FMA"
            + ("; the 16 rows as a tree: +8, +4, +2, +1" if tile else ""),
            "source": "TransformerEngine: common/cast/nvfp4/quantize_4over6_nvfp4.cuh",
        }
    return rules


FORMAT = Format(
    name=NAME,
    options=Nvfp4Options,
    quantize=quantize,
    dequantize=dequantize,
    codes=codes,
    layout=layout,
    describe=describe,
    global_amax=global_amax,
)
