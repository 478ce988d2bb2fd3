"""Scale bytes in the order that Blackwell's matrix units read: tiles of 128 rows x 4 scales, 512 bytes each.

A checkpoint is never stored like this (row-major scales only); an engine, or a matrix product in training, asks for it.
Row i, scale j of a matrix with C scale columns lies at

    ((i / 128) * ceil(C / 4) + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4

Agrees with TransformerEngine (common/cast/mxfp8/swizzle.cuh, common/cast/nvfp4/swizzle.cuh), FlashInfer and torchao's
to_blocked. Rows are padded to 128, scale columns to 4, with zero bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowprec.errors import FormatError

from .launch import Launch, Plan, Tile, carrier, matrices
from .tiles import indices, load_bytes, tile_origin

TILE_ROWS, TILE_COLUMNS = tl.constexpr(128), tl.constexpr(4)
LANES = tl.constexpr(32)  # rows i, i + 32, i + 64, i + 96 of a tile share 16 bytes
TILES = 8  # a program
WARPS = 4


@triton.jit
def swizzle_kernel(
    scale_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    """128 rows x COLUMNS scales of a contiguous uint8 [E, rows, columns] -> tiles in order."""
    matrix, row, column = tile_origin(rows, columns, TILE_ROWS, COLUMNS)
    byte_MG = load_bytes(scale_ptr, matrix, indices(row, TILE_ROWS), column, rows, columns, COLUMNS)
    across = tl.cdiv(columns, TILE_COLUMNS)
    down = tl.cdiv(rows, TILE_ROWS)
    row_M1, column_1G = tl.arange(0, TILE_ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tile_1G = (matrix * down + row // TILE_ROWS) * across + column // TILE_COLUMNS + column_1G // TILE_COLUMNS
    in_tile_MG = (row_M1 % LANES) * 16 + row_M1 // LANES * TILE_COLUMNS + column_1G % TILE_COLUMNS
    mask_1G = column // TILE_COLUMNS + column_1G // TILE_COLUMNS < across
    tl.store(out_ptr + tile_1G * (TILE_ROWS * TILE_COLUMNS) + in_tile_MG, byte_MG, mask=mask_1G & (row_M1 >= 0))


def plan_swizzle(scale: torch.Tensor) -> Plan[torch.Tensor]:
    """The launches of `swizzle`."""
    if scale.ndim < 2 or scale.element_size() != 1:
        raise FormatError(
            f"swizzle: scales are {scale.dtype} {list(scale.shape)}, give bytes [.., M, C] as quantize does"
        )
    *lead, rows, columns = scale.shape
    high, wide = TILE_ROWS.value, TILE_COLUMNS.value
    out = torch.empty(
        (*lead, -(-rows // high) * high, -(-columns // wide) * wide), dtype=torch.uint8, device=scale.device
    )
    scale = carrier(scale.contiguous())
    view = matrices(scale)
    size = Tile(rows=high, columns=wide * TILES, step_rows=high, step_columns=wide * TILES)
    launch = Launch(
        kernel=swizzle_kernel,
        programs=size.programs(view),
        arguments={"scale_ptr": scale, "out_ptr": out, "rows": rows, "columns": columns},
        constants={"COLUMNS": size.columns},
        warps=WARPS,
    )
    return Plan(out, (launch,))


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """[.., M, C] row-major scale bytes -> uint8 [.., roundup(M, 128), roundup(C, 4)], each matrix in tile order."""
    return plan_swizzle(scale).run(scale)
