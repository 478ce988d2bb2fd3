"""NVFP4 in Triton: the bytes of `lowprec.formats.nvfp4`, on torch tensors.

Two launches: the global amax, unless it is given, then everything else. The amax stays on the device.

With one global scale a matrix, a contiguous matrix is one long row of blocks. With one a row, and for 16x16 tiles, a
program has some rows of blocks. Either way its tile is worked on as N blocks of B = 16 elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowprec.errors import FormatError
from lowprec.formats import numerics as nm
from lowprec.formats.nvfp4 import NAME, FourOverSix, Nvfp4Options, Outer, layout

from . import casts
from .amax import plan_amax
from .casts import E2M1_MAX, E4M3_MAX, FLT_MAX, RECIPROCAL_OF_6
from .launch import (
    Launch,
    Matrices,
    Plan,
    QuantizedTensors,
    Tile,
    carrier,
    check_input,
    empty,
    matrices,
    tile,
    torch_dtype,
)
from .launch import unavailable as unavailable
from .tiles import indices, load_bytes, load_values, spread, store_bytes, store_values, tile_origin

TAKES_TORCH = True

BLOCK = tl.constexpr(nm.NVFP4_BLOCK)
RATIO = tl.constexpr(float(nm.FOUR_OVER_SIX))
NONE, MAE, MSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # FOUR_OVER_SIX
ERRORS = {None: NONE.value, FourOverSix.MAE: MAE.value, FourOverSix.MSE: MSE.value}

TILE_ELEMENTS = 4096
CHOOSING_ELEMENTS = 2048  # four over six holds two candidates at a time
WARPS = 4


# ---- sums whose order is part of the format ------------------------------------------------------------


@triton.jit
def add_in_order(total_N: tl.tensor, term_NW: tl.tensor) -> tl.tensor:
    """total + term[:, 0] + term[:, 1] + ..., strictly in this order: the first half, then the second.

    `tl.sum` may take any order, and does.
    """
    if term_NW.shape[1] == 1:
        return total_N + tl.reshape(term_NW, (term_NW.shape[0],))
    else:
        halves = tl.reshape(term_NW, (term_NW.shape[0], 2, term_NW.shape[1] // 2))
        first_NW, second_NW = tl.split(tl.permute(halves, (0, 2, 1)))
        return add_in_order(add_in_order(total_N, first_NW), second_NW)


@triton.jit
def add_rows_as_tree(term_MG: tl.tensor) -> tl.tensor:
    """[M, G] -> [1, G]: row r + row r + M/2, and so on with the half that is left."""
    if term_MG.shape[0] == 1:
        return term_MG
    else:
        halves = tl.reshape(term_MG, (2, term_MG.shape[0] // 2, term_MG.shape[1]))
        upper_MG, lower_MG = tl.split(tl.permute(halves, (1, 2, 0)))
        return add_rows_as_tree(upper_MG + lower_MG)


# ---- scales --------------------------------------------------------------------------------------------


@triton.jit
def _outer_place(
    matrix: tl.tensor, row_M: tl.tensor, rows: tl.tensor, EACH_ROW: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(offsets, mask) of the tile's global amax and scale: [M, 1], one a row, or one number for all rows."""
    if EACH_ROW:
        return matrix * rows + row_M[:, None], row_M[:, None] < rows
    else:
        return matrix, matrix >= 0


@triton.jit
def _encode_scale(g: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """S, the multiplier that brings the largest block scale to e4m3_max; 1 for a global amax of 0 or Inf."""
    scale = tl.minimum(tl.div_rn(LARGEST, g), FLT_MAX)
    return tl.where((g == 0.0) | (scale == 0.0), 1.0, scale)


@triton.jit
def _error(
    x_NB: tl.tensor, value_N1: tl.tensor, g: tl.tensor, decode: tl.tensor, ERROR: tl.constexpr, LARGEST: tl.constexpr
) -> tl.tensor:
    """The error of each block under a block scale: [N]."""
    multiplier_N1 = tl.minimum(tl.div_rn(1.0, value_N1 * decode), FLT_MAX)
    difference_NB = casts.round_e2m1(x_NB * multiplier_N1) * value_N1 * g
    difference_NB = tl.div_rn(difference_NB, tl.full(difference_NB.shape, LARGEST, tl.float32)) - x_NB
    term_NB = tl.abs(difference_NB) if ERROR == MAE else difference_NB * difference_NB
    return add_in_order(tl.zeros((x_NB.shape[0],), tl.float32), term_NB)


@triton.jit
def _choose_scale(
    x_NB: tl.tensor,
    base_N1: tl.tensor,
    g: tl.tensor,
    decode: tl.tensor,
    ERROR: tl.constexpr,
    LARGEST: tl.constexpr,
    TILED: tl.constexpr,
    TARGET: tl.constexpr,
) -> tl.tensor:
    """Four over six: of two E4M3 scales for each block the one with the smaller error, 6 where they are equal."""
    N: tl.constexpr = x_NB.shape[0]
    six_N1 = casts.encode_e4m3(tl.minimum(base_N1, E4M3_MAX), TARGET)
    four_N1 = casts.encode_e4m3(tl.minimum(base_N1 * RATIO, E4M3_MAX), TARGET)
    error_six = _error(x_NB, casts.decode_e4m3(six_N1), g, decode, ERROR, LARGEST)
    error_four = _error(x_NB, casts.decode_e4m3(four_N1), g, decode, ERROR, LARGEST)
    if TILED:
        error_six = add_rows_as_tree(tl.reshape(error_six, (BLOCK, N // BLOCK)))
        error_four = add_rows_as_tree(tl.reshape(error_four, (BLOCK, N // BLOCK)))
        chosen = tl.broadcast_to((error_four < error_six).to(tl.int32), (BLOCK, N // BLOCK))
    else:
        chosen = (error_four < error_six).to(tl.int32)
    return tl.where(tl.reshape(chosen, (N, 1)) != 0, four_N1, six_N1)


@triton.jit
def _block_amax(x_NB: tl.tensor, TILED: tl.constexpr) -> tl.tensor:
    """[N, 1]: the amax of each block, or of the 16x16 tile that it is a row of."""
    amax_N1 = casts.row_amax(x_NB)
    if TILED:
        N: tl.constexpr = x_NB.shape[0]
        bits_MG = tl.reshape(casts.bits_of(amax_N1), (BLOCK, N // BLOCK))
        bits_MG = tl.broadcast_to(tl.max(bits_MG, axis=0, keep_dims=True), (BLOCK, N // BLOCK))
        amax_N1 = casts.float_of(tl.reshape(bits_MG, (N, 1)))
    return amax_N1


@triton.jit
def _block_scale(
    x_NB: tl.tensor,
    g: tl.tensor,
    encode: tl.tensor,
    decode: tl.tensor,
    ERROR: tl.constexpr,
    LARGEST: tl.constexpr,
    TILED: tl.constexpr,
    TARGET: tl.constexpr,
) -> tl.tensor:
    """[N, 1]: the E4M3 byte of each block. The formula differs between plain and four over six."""
    amax_N1 = _block_amax(x_NB, TILED)
    if ERROR == NONE:
        return casts.encode_e4m3(tl.minimum(amax_N1 * (encode * RECIPROCAL_OF_6), FLT_MAX), TARGET)
    else:
        base_N1 = tl.div_rn(amax_N1, tl.full(amax_N1.shape, E2M1_MAX, tl.float32)) * encode
        return _choose_scale(x_NB, base_N1, g, decode, ERROR, LARGEST, TILED, TARGET)


@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    global_scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride_matrix: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    EACH_ROW: tl.constexpr,
    TILED: tl.constexpr,
    ERROR: tl.constexpr,
    LARGEST: tl.constexpr,
    FAKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """Codes, block scales and global scales; or, if FAKE, the values that they decode to, in the dtype of x."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    matrix, row, column = tile_origin(rows, columns, ROWS, COLUMNS)
    row_M, column_K = indices(row, ROWS), indices(column, COLUMNS)
    x_MK = load_values(x_ptr, matrix, row_M, column_K, rows, columns, stride_matrix, stride_row, stride_column)
    x_NB = tl.reshape(x_MK, (ROWS * BLOCKS, BLOCK))

    to_outer, in_outer = _outer_place(matrix, row_M, rows, EACH_ROW)
    g = tl.load(amax_ptr + to_outer, mask=in_outer, other=0.0)
    encode = _encode_scale(g, LARGEST)
    decode = tl.div_rn(1.0, encode)
    if not FAKE:
        if column == 0:  # some programs may store the same value in the same place
            tl.store(global_scale_ptr + to_outer, decode, mask=in_outer)
    if EACH_ROW:
        g, encode, decode = spread(g, BLOCKS), spread(encode, BLOCKS), spread(decode, BLOCKS)
    scale_N1 = _block_scale(x_NB, g, encode, decode, ERROR, LARGEST, TILED, TARGET)
    factor_N1 = casts.decode_e4m3(scale_N1) * decode
    scaled_NB = x_NB * tl.minimum(tl.div_rn(1.0, factor_N1), FLT_MAX)

    if FAKE:
        y_NB = casts.round_e2m1(scaled_NB) * factor_N1
        store_values(q_ptr, y_NB, matrix, row_M, column_K, rows, columns, TARGET)
    else:
        pair_NH = casts.pack_e2m1(scaled_NB, TARGET)
        store_bytes(q_ptr, pair_NH, matrix, row_M, column // 2, rows, columns // 2, COLUMNS // 2)
        store_bytes(scale_ptr, scale_N1, matrix, row_M, column // BLOCK, rows, columns // BLOCK, BLOCKS)


@triton.jit
def dequantize_kernel(
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    global_scale_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    EACH_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """fl(fl(sb * global_scale) * q), in the dtype of y."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    matrix, row, column = tile_origin(rows, columns, ROWS, COLUMNS)
    row_M = indices(row, ROWS)
    pair_MH = load_bytes(q_ptr, matrix, row_M, column // 2, rows, columns // 2, COLUMNS // 2)
    scale_MG = load_bytes(scale_ptr, matrix, row_M, column // BLOCK, rows, columns // BLOCK, BLOCKS)
    to_outer, in_outer = _outer_place(matrix, row_M, rows, EACH_ROW)
    factor_MG = casts.decode_e4m3(scale_MG) * tl.load(global_scale_ptr + to_outer, mask=in_outer, other=0.0)

    q_NB = tl.reshape(casts.unpack_e2m1(pair_MH), (ROWS * BLOCKS, BLOCK))
    y_NB = tl.reshape(factor_MG, (ROWS * BLOCKS, 1)) * q_NB
    store_values(y_ptr, y_NB, matrix, row_M, indices(column, COLUMNS), rows, columns, TARGET)


# ---- plans ---------------------------------------------------------------------------------------------


def plan_global_amax(x: torch.Tensor, options: Nvfp4Options, partner: torch.Tensor | None = None) -> Plan[torch.Tensor]:
    """The launches of `global_amax`."""
    for tensor in (x, x if partner is None else partner):
        layout(check_input(NAME, tensor), options)
    if partner is not None and (partner.shape != x.shape or partner.dtype != x.dtype):
        raise FormatError(
            f"{NAME}: partners are {list(x.shape)} {x.dtype} and {list(partner.shape)} {partner.dtype}, "
            "one launch takes equal shapes and dtypes; ask for each and take the maximum"
        )
    return plan_amax(x, partner=partner, each_row=options.outer is Outer.ROW)


def _view(x: torch.Tensor, options: Nvfp4Options) -> tuple[Matrices, Tile]:
    """Each matrix as one row if all its blocks share one scale and none is a tile; else rows as they are."""
    view, tiled = matrices(x), options.block[0] > 1
    elements = TILE_ELEMENTS if options.four_over_six is None else CHOOSING_ELEMENTS
    if tiled:
        columns = tile(view, elements=elements // nm.NVFP4_BLOCK, block=nm.NVFP4_BLOCK).columns
        high = nm.NVFP4_BLOCK
        return view, Tile(rows=high, columns=columns, step_rows=high, step_columns=columns)
    view = view.as_rows() if options.outer is Outer.ROW else view.as_one_row()
    return view, tile(view, elements=elements, block=nm.NVFP4_BLOCK)


def _quantize(
    x: torch.Tensor, options: Nvfp4Options, amax: torch.Tensor | None, out: tuple[torch.Tensor, ...], *, fake: bool
) -> tuple[Launch, ...]:
    """The launches that fill `out`, (qdata, scale, global_scale); if `fake`, the values, (y, y, y)."""
    qdata, scale, global_scale = out
    before: tuple[Launch, ...] = ()
    if amax is None:
        first = plan_global_amax(x, options)
        amax, before = first.result, first.launches
    view, size = _view(x, options)
    largest = float(nm.E2M1_MAX) * options.e4m3_max
    launch = Launch(
        kernel=quantize_kernel,
        programs=size.programs(view),
        arguments={
            "x_ptr": carrier(x),
            "amax_ptr": amax.contiguous(),
            "q_ptr": carrier(qdata),
            "scale_ptr": carrier(scale),
            "global_scale_ptr": carrier(global_scale),
            **view.arguments(),
        },
        constants={
            "EACH_ROW": options.outer is Outer.ROW,
            "TILED": options.block[0] > 1,
            "ERROR": ERRORS[options.four_over_six],
            "LARGEST": largest,
            "FAKE": fake,
            "ROWS": size.rows,
            "COLUMNS": size.columns,
        },
        warps=WARPS,
    )
    return (*before, launch)


def plan_quantize(x: torch.Tensor, options: Nvfp4Options, amax: torch.Tensor | None = None) -> Plan[QuantizedTensors]:
    """The launches of `quantize`."""
    shapes = layout(check_input(NAME, x), options)
    out = tuple(empty(spec, x) for spec in shapes if spec is not None)
    if not x.numel():  # no program will come by to write the global scale
        if amax is not None:
            raise FormatError(f"{NAME}: amax was given for a tensor without elements, leave it out")
        out[2].fill_(1.0)
    return Plan(QuantizedTensors(*out), _quantize(x, options, amax, out, fake=False))


def plan_fake_quantize(x: torch.Tensor, options: Nvfp4Options, amax: torch.Tensor | None = None) -> Plan[torch.Tensor]:
    """The launches of `fake_quantize`."""
    layout(check_input(NAME, x), options)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Plan(y, _quantize(x, options, amax, (y, y, y), fake=True))


def plan_dequantize(quantized: QuantizedTensors, options: Nvfp4Options, dtype: Any) -> Plan[torch.Tensor]:
    """The launches of `dequantize`."""
    if quantized.global_scale is None:
        raise FormatError(f"{NAME}: global_scale is missing, pass all three tensors")
    *rows, half = quantized.qdata.shape
    y = torch.empty((*rows, 2 * half), dtype=torch_dtype(dtype), device=quantized.qdata.device)
    each_row = options.outer is Outer.ROW
    view = matrices(y).as_rows() if each_row else matrices(y).as_one_row()
    size = tile(view, elements=TILE_ELEMENTS, block=nm.NVFP4_BLOCK)
    launch = Launch(
        kernel=dequantize_kernel,
        programs=size.programs(view),
        arguments={
            "q_ptr": carrier(quantized.qdata.contiguous()),
            "scale_ptr": carrier(quantized.scale.contiguous()),
            "global_scale_ptr": quantized.global_scale.contiguous(),
            "y_ptr": carrier(y),
            "rows": view.rows,
            "columns": view.columns,
        },
        constants={"EACH_ROW": each_row, "ROWS": size.rows, "COLUMNS": size.columns},
        warps=WARPS,
    )
    return Plan(y, (launch,))


# ---- the reference's functions -------------------------------------------------------------------------


def global_amax(x: torch.Tensor, options: Nvfp4Options, partner: torch.Tensor | None = None) -> torch.Tensor:
    """The global amax, NaN ignored: float32 [..] a matrix, [.., M] a row; of both tensors if there is a partner."""
    return plan_global_amax(x, options, partner).run(x)


def quantize(x: torch.Tensor, options: Nvfp4Options, amax: torch.Tensor | None = None) -> QuantizedTensors:
    """[.., M, K] of any strides -> bytes of two nibbles [.., M, K/2], E4M3 [.., M, K/16], global scale [..] or [.., M].

    `amax`: the global amax to use instead of the tensor's own, float32 [..] or [.., M] on the same device.
    """
    return plan_quantize(x, options, amax).run(x)


def fake_quantize(x: torch.Tensor, options: Nvfp4Options, amax: torch.Tensor | None = None) -> torch.Tensor:
    """dequantize(quantize(x)) in the dtype of `x`, without codes or scales in memory."""
    return plan_fake_quantize(x, options, amax).run(x)


def dequantize(quantized: QuantizedTensors, options: Nvfp4Options, dtype: Any) -> torch.Tensor:
    """fl(fl(sb * global_scale) * q), then one rounding to `dtype`: [.., M, K]."""
    return plan_dequantize(quantized, options, dtype).run(quantized.qdata)
