"""Block-wise FP8 in Triton: the bytes of `lowprec.formats.fp8_block`, on torch tensors.

A program has one block, or, where a block lies in one row, the blocks of some rows below each other. Blocks at the
edges may be ragged; a block whose sides are no powers of two leaves the rest of its tile idle.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowprec.errors import FormatError
from lowprec.formats import numerics as nm
from lowprec.formats.fp8_block import NAME, Fp8BlockOptions, Rule, Scale, layout

from . import casts
from .casts import E4M3_MAX
from .launch import (
    Launch,
    Matrices,
    Plan,
    QuantizedTensors,
    Tile,
    carrier,
    check_input,
    empties,
    matrices,
    power_of_two,
    torch_dtype,
)
from .launch import unavailable as unavailable
from .tiles import contiguous, indices, inside, load_values, tile_origin

TAKES_TORCH = True

TE, DEEPGEMM, DEEPSEEK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # RULE
RULES = {Rule.TE: TE.value, Rule.DEEPGEMM: DEEPGEMM.value, Rule.DEEPSEEK: DEEPSEEK.value}
DEEPGEMM_AMAX_FLOOR = tl.constexpr(float(nm.DEEPGEMM_AMAX_FLOOR))

ROWS_OF_BLOCKS = 64  # rows a program where a block lies in one row
ELEMENTS_A_WARP = 2048
LARGEST_TILE = 1 << 15  # elements; a larger block would not fit in a program's registers


@triton.jit
def _te_scales(amax: tl.tensor, POW2: tl.constexpr, FINITE_MAX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(encode, decode) a block. If 448 / amax overflows, the largest value of the input's dtype is taken."""
    encode = tl.div_rn(E4M3_MAX, amax)
    encode = tl.where(encode > casts.FLT_MAX, FINITE_MAX, encode)
    if POW2:
        encode = casts.float_of(casts.bits_of(encode) & casts.INFINITY)
    encode = tl.where((amax == 0.0) | (amax > casts.FLT_MAX), 1.0, encode)
    return encode, tl.div_rn(1.0, encode)


@triton.jit
def _floored_scale(amax: tl.tensor, POW2: tl.constexpr) -> tl.tensor:
    """The decode scale of DeepGEMM and DeepSeek; NaN stays NaN with FP32 scales and is 2^127 in POW2, as Inf is."""
    scale = tl.div_rn(tl.where(amax < DEEPGEMM_AMAX_FLOOR, DEEPGEMM_AMAX_FLOOR, amax), E4M3_MAX)
    bits = casts.bits_of(scale)
    if POW2:
        exponent = (bits >> casts.MANTISSA_BITS) + ((bits & casts.MANTISSA) != 0).to(tl.int32)
        return casts.float_of(tl.minimum(tl.maximum(exponent, 1), casts.E8M0_MAX) << casts.MANTISSA_BITS)
    else:
        return casts.float_of(tl.where(scale == scale, bits, casts.NAN))


@triton.jit
def _scale_place(
    matrix: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    STEP_ROWS: tl.constexpr,
    STEP_COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(offsets, mask) of the tile's scales: [M, 1], one a row, or [1, 1], one for the tile."""
    column_1 = indices(column // STEP_COLUMNS, 1)
    scale_columns = tl.cdiv(columns, STEP_COLUMNS)
    if ONE_ROW:
        scale_rows, row_M = rows, indices(row, STEP_ROWS)
    else:
        scale_rows, row_M = tl.cdiv(rows, STEP_ROWS), indices(row // STEP_ROWS, 1)
    mask = inside(row_M, column_1, scale_rows, scale_columns)
    return contiguous(matrix, row_M, column_1, scale_rows, scale_columns), mask


@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride_matrix: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    RULE: tl.constexpr,
    POW2: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    FAKE: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    STEP_COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """Codes and scales; or, if FAKE, the values that they decode to, in the dtype of x."""
    matrix, row, column = tile_origin(rows, columns, STEP_ROWS, STEP_COLUMNS)
    row_M, column_K = indices(row, ROWS), indices(column, COLUMNS)
    # What is beyond the block, here or in a ragged one, counts as zero and is not stored.
    end_row, end_column = tl.minimum(row + STEP_ROWS, rows), tl.minimum(column + STEP_COLUMNS, columns)
    x_MK = load_values(x_ptr, matrix, row_M, column_K, end_row, end_column, stride_matrix, stride_row, stride_column)
    # [M, 1], one a row, or [1, 1], one for the tile.
    amax = casts.row_amax(x_MK) if RULE == TE else casts.row_amax_or_nan(x_MK)
    if not ONE_ROW:
        amax = casts.float_of(tl.max(casts.bits_of(amax), axis=0, keep_dims=True))
    if RULE == TE:
        encode, scale = _te_scales(amax, POW2, FINITE_MAX)
        scaled_MK = x_MK * encode
    else:
        scale = _floored_scale(amax, POW2)
        if RULE == DEEPSEEK and not POW2:
            scaled_MK = tl.div_rn(x_MK, tl.broadcast_to(scale, (ROWS, COLUMNS)))
        else:  # the reciprocal of a power of two is exact, so multiplying by it is dividing
            scaled_MK = x_MK * tl.div_rn(1.0, scale)

    to_MK, mask_MK = contiguous(matrix, row_M, column_K, rows, columns), inside(row_M, column_K, end_row, end_column)
    if FAKE:
        y_MK = casts.round_e4m3(scaled_MK) * scale
        tl.store(q_ptr + to_MK, casts.from_float32(y_MK, q_ptr.dtype.element_ty, TARGET), mask=mask_MK)
    else:
        tl.store(q_ptr + to_MK, casts.encode_e4m3(scaled_MK, TARGET), mask=mask_MK)
        to, mask = _scale_place(matrix, row, column, rows, columns, STEP_ROWS, STEP_COLUMNS, ONE_ROW)
        tl.store(scale_ptr + to, scale, mask=mask)


@triton.jit
def dequantize_kernel(
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    STEP_ROWS: tl.constexpr,
    STEP_COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """fl(q * scale), in the dtype of y."""
    matrix, row, column = tile_origin(rows, columns, STEP_ROWS, STEP_COLUMNS)
    row_M, column_K = indices(row, ROWS), indices(column, COLUMNS)
    end_row, end_column = tl.minimum(row + STEP_ROWS, rows), tl.minimum(column + STEP_COLUMNS, columns)
    mask_MK = inside(row_M, column_K, end_row, end_column)
    at_MK = contiguous(matrix, row_M, column_K, rows, columns)
    at, mask = _scale_place(matrix, row, column, rows, columns, STEP_ROWS, STEP_COLUMNS, ONE_ROW)
    scale = tl.load(scale_ptr + at, mask=mask, other=0)
    y_MK = casts.decode_e4m3(tl.load(q_ptr + at_MK, mask=mask_MK, other=0)) * scale
    tl.store(y_ptr + at_MK, casts.from_float32(y_MK, y_ptr.dtype.element_ty, TARGET), mask=mask_MK)


# ---- plans ---------------------------------------------------------------------------------------------


def _tile(x: Matrices, block: tuple[int, int]) -> Tile:
    """One block, or some rows of blocks that lie in one row."""
    rows = min(ROWS_OF_BLOCKS, power_of_two(x.rows)) if block[0] == 1 else block[0]
    tile = Tile(rows=power_of_two(rows), columns=power_of_two(block[1]), step_rows=rows, step_columns=block[1])
    if tile.rows * tile.columns > LARGEST_TILE:
        raise FormatError(f"{NAME}: triton has no kernel for blocks of {list(block)}, use backend='reference'")
    return tile


def _view(x: torch.Tensor, block: tuple[int, int]) -> Matrices:
    """Where blocks lie in one row, all rows are one matrix; if none is ragged, every block is a row of its own."""
    view = matrices(x)
    if block[0] > 1:
        return view
    view = view.as_rows()
    one = view.as_one_row()
    if one.rows != 1 or one.stride_column != 1 or view.columns % block[1]:
        return view
    return Matrices(
        count=one.count,
        rows=one.columns // block[1],
        columns=block[1],
        stride_matrix=one.stride_matrix,
        stride_row=block[1],
        stride_column=1,
    )


def _constants(size: Tile, block: tuple[int, int]) -> dict[str, Any]:
    return {
        "STEP_ROWS": size.step_rows,
        "STEP_COLUMNS": size.step_columns,
        "ONE_ROW": block[0] == 1,
        "ROWS": size.rows,
        "COLUMNS": size.columns,
    }


def _warps(size: Tile) -> int:
    return min(max(size.rows * size.columns // ELEMENTS_A_WARP, 1), 16)


def _quantize(x: torch.Tensor, options: Fp8BlockOptions, q: torch.Tensor, scale: torch.Tensor, fake: bool) -> Launch:
    view = _view(x, options.block)
    size = _tile(view, options.block)
    return Launch(
        kernel=quantize_kernel,
        programs=size.programs(view),
        arguments={"x_ptr": carrier(x), "q_ptr": carrier(q), "scale_ptr": carrier(scale), **view.arguments()},
        constants={
            "RULE": RULES[options.rule],
            "POW2": options.scale is Scale.POW2,
            "FINITE_MAX": torch.finfo(x.dtype).max,
            "FAKE": fake,
            **_constants(size, options.block),
        },
        warps=_warps(size),
    )


def plan_quantize(
    x: torch.Tensor, options: Fp8BlockOptions, amax: torch.Tensor | None = None
) -> Plan[QuantizedTensors]:
    """The launches of `quantize`."""
    del amax  # no global scale
    out = empties(layout(check_input(NAME, x), options), x)
    return Plan(out, (_quantize(x, options, out.qdata, out.scale, False),))


def plan_fake_quantize(
    x: torch.Tensor, options: Fp8BlockOptions, amax: torch.Tensor | None = None
) -> Plan[torch.Tensor]:
    """The launches of `fake_quantize`."""
    del amax
    layout(check_input(NAME, x), options)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Plan(y, (_quantize(x, options, y, y, True),))


def plan_dequantize(quantized: QuantizedTensors, options: Fp8BlockOptions, dtype: Any) -> Plan[torch.Tensor]:
    """The launches of `dequantize`."""
    y = torch.empty(quantized.qdata.shape, dtype=torch_dtype(dtype), device=quantized.qdata.device)
    view = _view(y, options.block)
    size = _tile(view, options.block)
    launch = Launch(
        kernel=dequantize_kernel,
        programs=size.programs(view),
        arguments={
            "q_ptr": carrier(quantized.qdata.contiguous()),
            "scale_ptr": quantized.scale.contiguous(),
            "y_ptr": carrier(y),
            "rows": view.rows,
            "columns": view.columns,
        },
        constants=_constants(size, options.block),
        warps=_warps(size),
    )
    return Plan(y, (launch,))


def quantize(x: torch.Tensor, options: Fp8BlockOptions, amax: torch.Tensor | None = None) -> QuantizedTensors:
    """[.., M, K] of any strides -> E4M3 [.., M, K] and float32 [.., ceil(M/bm), ceil(K/bk)]."""
    return plan_quantize(x, options, amax).run(x)


def fake_quantize(x: torch.Tensor, options: Fp8BlockOptions, amax: torch.Tensor | None = None) -> torch.Tensor:
    """dequantize(quantize(x)) in the dtype of `x`, in one pass over memory."""
    return plan_fake_quantize(x, options, amax).run(x)


def dequantize(quantized: QuantizedTensors, options: Fp8BlockOptions, dtype: Any) -> torch.Tensor:
    """fl(q * scale), then one rounding to `dtype`: [.., M, K]."""
    return plan_dequantize(quantized, options, dtype).run(quantized.qdata)
