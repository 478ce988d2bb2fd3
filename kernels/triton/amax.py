"""The global amax of a tensor, or of two partners together, in one launch.

Partners (gate with up) are served with one global scale, so they must be quantized with one amax: the larger of
theirs, expert by expert. Both are read by the same programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import casts
from .launch import Launch, Plan, carrier, matrices, tile
from .tiles import indices, load_values, tile_origin

TILE_ELEMENTS = 8192
WARPS = 8


@triton.jit
def amax_kernel(
    x_ptr: tl.tensor,
    partner_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride_matrix: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    PAIRED: tl.constexpr,
    EACH_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Raise amax, int32 bits of floats that were zero, to the largest |x| of each matrix or of each row.

    The maximum does not depend on the order in which programs arrive, unlike a sum.
    """
    matrix, row, column = tile_origin(rows, columns, ROWS, COLUMNS)
    row_M, column_K = indices(row, ROWS), indices(column, COLUMNS)
    x_MK = load_values(x_ptr, matrix, row_M, column_K, rows, columns, stride_matrix, stride_row, stride_column)
    amax_M1 = casts.bits_of(casts.row_amax(x_MK))
    if PAIRED:
        x_MK = load_values(
            partner_ptr, matrix, row_M, column_K, rows, columns, stride_matrix, stride_row, stride_column
        )
        amax_M1 = tl.maximum(amax_M1, casts.bits_of(casts.row_amax(x_MK)))
    if EACH_ROW:
        row_M1 = row_M[:, None]
        tl.atomic_max(amax_ptr + matrix * rows + row_M1, amax_M1, mask=row_M1 < rows, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr + matrix, tl.max(tl.reshape(amax_M1, (ROWS,)), axis=0), sem="relaxed")


def plan_amax(x: torch.Tensor, *, partner: torch.Tensor | None = None, each_row: bool) -> Plan[torch.Tensor]:
    """float32 [..], or [.., M] if `each_row`: the largest |x| of each matrix or row, of both tensors if there are two.

    `partner` has the shape and dtype of `x`.
    """
    if partner is not None and partner.stride() != x.stride():
        x, partner = x.contiguous(), partner.contiguous()
    amax = torch.zeros(x.shape[:-1] if each_row else x.shape[:-2], dtype=torch.int32, device=x.device)
    view = matrices(x).as_rows() if each_row else matrices(x).as_one_row()
    size = tile(view, elements=TILE_ELEMENTS, block=1)
    launch = Launch(
        kernel=amax_kernel,
        programs=size.programs(view),
        arguments={
            "x_ptr": carrier(x),
            "partner_ptr": carrier(x if partner is None else partner),
            "amax_ptr": amax,
            **view.arguments(),
        },
        constants={
            "PAIRED": partner is not None,
            "EACH_ROW": each_row,
            "ROWS": size.rows,
            "COLUMNS": size.columns,
        },
        warps=WARPS,
    )
    return Plan(amax.view(torch.float32), (launch,))
