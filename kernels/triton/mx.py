"""What MXFP8 and MXFP4 have in common: 32 elements of a row share an E8M0 byte, the elements differ.

A block lies in one row, so a contiguous tensor, stacked experts included, is one long row of blocks: one launch, no
ragged tile but the last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowprec.formats import numerics as nm
from lowprec.formats.base import Layout, Shape

from . import casts
from .casts import RECIPROCAL_OF_6, RECIPROCAL_OF_448
from .launch import Launch, Plan, QuantizedTensors, carrier, empties, matrices, tile, torch_dtype
from .tiles import indices, load_bytes, load_values, store_bytes, store_values, tile_origin

BLOCK = tl.constexpr(nm.MX_BLOCK)
E2M1_EMAX = tl.constexpr(nm.E2M1_EMAX)
E4M3, E2M1 = tl.constexpr(0), tl.constexpr(1)  # ELEMENT
RCEIL, FLOOR, EVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # RULE

TILE_ELEMENTS = 4096
WARPS = 4


@triton.jit
def _scale_byte(amax: tl.tensor, ELEMENT: tl.constexpr, RULE: tl.constexpr, TARGET: tl.constexpr) -> tl.tensor:
    """The E8M0 byte of a block, int32; Inf gives 254 under every rule."""
    if RULE == RCEIL:
        return casts.encode_e8m0(amax * (RECIPROCAL_OF_448 if ELEMENT == E4M3 else RECIPROCAL_OF_6), TARGET)
    else:
        bits = casts.bits_of(amax)
        if RULE == EVEN:  # to one mantissa bit, ties away: half of that bit's weight is added
            bits += 1 << 21
        exponent = tl.maximum((bits >> casts.MANTISSA_BITS) - E2M1_EMAX, 0)
        return tl.where(amax > casts.FLT_MAX, casts.E8M0_MAX, exponent)


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
    ELEMENT: tl.constexpr,
    RULE: tl.constexpr,
    FAKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """Codes and scale bytes; or, if FAKE, the values that they decode to, in the dtype of x."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    matrix, row, column = tile_origin(rows, columns, ROWS, COLUMNS)
    row_M, column_K = indices(row, ROWS), indices(column, COLUMNS)
    x_MK = load_values(x_ptr, matrix, row_M, column_K, rows, columns, stride_matrix, stride_row, stride_column)

    x_NB = tl.reshape(x_MK, (ROWS * BLOCKS, BLOCK))
    byte_N1 = _scale_byte(casts.row_amax(x_NB), ELEMENT, RULE, TARGET)
    scaled_NB = x_NB * casts.e8m0_multiplier(byte_N1)

    if FAKE:
        q_NB = casts.round_e4m3(scaled_NB) if ELEMENT == E4M3 else casts.round_e2m1(scaled_NB)
        y_NB = q_NB * casts.decode_e8m0(byte_N1)
        store_values(q_ptr, y_NB, matrix, row_M, column_K, rows, columns, TARGET)
    else:
        if ELEMENT == E4M3:
            code_NB = casts.encode_e4m3(scaled_NB, TARGET)
            store_bytes(q_ptr, code_NB, matrix, row_M, column, rows, columns, COLUMNS)
        else:
            pair_NH = casts.pack_e2m1(scaled_NB, TARGET)
            store_bytes(q_ptr, pair_NH, matrix, row_M, column // 2, rows, columns // 2, COLUMNS // 2)
        store_bytes(scale_ptr, byte_N1, matrix, row_M, column // BLOCK, rows, columns // BLOCK, COLUMNS // BLOCK)


@triton.jit
def dequantize_kernel(
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """The values of codes, q * 2^(byte - 127), in the dtype of y."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    matrix, row, column = tile_origin(rows, columns, ROWS, COLUMNS)
    row_M = indices(row, ROWS)
    if ELEMENT == E4M3:
        q = casts.decode_e4m3(load_bytes(q_ptr, matrix, row_M, column, rows, columns, COLUMNS))
    else:
        q = casts.unpack_e2m1(load_bytes(q_ptr, matrix, row_M, column // 2, rows, columns // 2, COLUMNS // 2))
    byte_MG = load_bytes(scale_ptr, matrix, row_M, column // BLOCK, rows, columns // BLOCK, BLOCKS)

    q_NB = tl.reshape(q, (ROWS * BLOCKS, BLOCK))
    y_NB = q_NB * casts.decode_e8m0(tl.reshape(byte_MG, (ROWS * BLOCKS, 1)))
    store_values(y_ptr, y_NB, matrix, row_M, indices(column, COLUMNS), rows, columns, TARGET)


# ---- plans ---------------------------------------------------------------------------------------------


def plan_quantize(x: torch.Tensor, layout: Layout, element: int, rule: int) -> Plan[QuantizedTensors]:
    """Codes and scale bytes of `layout`."""
    out = empties(layout, x)
    return Plan(out, (_quantize(x, out.qdata, out.scale, element, rule, fake=False),))


def plan_fake_quantize(x: torch.Tensor, element: int, rule: int) -> Plan[torch.Tensor]:
    """The values that codes and scale bytes decode to, [.., M, K] in the dtype of `x`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Plan(y, (_quantize(x, y, y, element, rule, fake=True),))


def _quantize(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, element: int, rule: int, *, fake: bool) -> Launch:
    view = matrices(x).as_rows().as_one_row()
    size = tile(view, elements=TILE_ELEMENTS, block=nm.MX_BLOCK)
    return Launch(
        kernel=quantize_kernel,
        programs=size.programs(view),
        arguments={"x_ptr": carrier(x), "q_ptr": carrier(q), "scale_ptr": carrier(scale), **view.arguments()},
        constants={"ELEMENT": element, "RULE": rule, "FAKE": fake, "ROWS": size.rows, "COLUMNS": size.columns},
        warps=WARPS,
    )


def plan_dequantize(quantized: QuantizedTensors, shape: Shape, element: int, dtype: Any) -> Plan[torch.Tensor]:
    """The values of contiguous codes and scale bytes, `shape` [.., M, K] in `dtype`."""
    y = torch.empty(shape, dtype=torch_dtype(dtype), device=quantized.qdata.device)
    view = matrices(y).as_rows().as_one_row()
    size = tile(view, elements=TILE_ELEMENTS, block=nm.MX_BLOCK)
    launch = Launch(
        kernel=dequantize_kernel,
        programs=size.programs(view),
        arguments={
            "q_ptr": carrier(quantized.qdata.contiguous()),
            "scale_ptr": carrier(quantized.scale.contiguous()),
            "y_ptr": carrier(y),
            "rows": view.rows,
            "columns": view.columns,
        },
        constants={"ELEMENT": element, "ROWS": size.rows, "COLUMNS": size.columns},
        warps=WARPS,
    )
    return Plan(y, (launch,))
