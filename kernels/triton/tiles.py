"""Where a program works: its tile of a stack of matrices, and how the tile's results are stored.

A launch is one row of programs, one for each tile of each matrix. A tensor [E, M, K] is read through its strides, so
the transposed view of a tensor is quantized without a copy: the compiler loads along whichever axis is contiguous
and turns the tile around in shared memory. Results are contiguous.

Shape suffixes: M rows and K columns of the tile, powers of two; N blocks of the tile in row-major order, B elements of
a block; G blocks of one row. A 1 is an axis of one element.

Indices are 64-bit: a stack of experts has more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import casts


@triton.jit
def tile_origin(
    rows: tl.tensor, columns: tl.tensor, STEP_ROWS: tl.constexpr, STEP_COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(matrix, first row, first column) of this program's tile; tiles lie STEP_ROWS x STEP_COLUMNS apart."""
    across = tl.cdiv(columns, STEP_COLUMNS)
    tiles = tl.cdiv(rows, STEP_ROWS) * across
    program = tl.program_id(0).to(tl.int64)
    tile = program % tiles
    return program // tiles, (tile // across) * STEP_ROWS, (tile % across) * STEP_COLUMNS


@triton.jit
def indices(first: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """first, first + 1, ...: [COUNT] int64."""
    return first + tl.arange(0, COUNT)


@triton.jit
def strided(
    matrix: tl.tensor,
    row_M: tl.tensor,
    column_K: tl.tensor,
    stride_matrix: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
) -> tl.tensor:
    """[M, K]: offsets of the elements in a tensor with these strides."""
    return matrix * stride_matrix + row_M[:, None] * stride_row + column_K[None, :] * stride_column


@triton.jit
def contiguous(
    matrix: tl.tensor, row_M: tl.tensor, column_K: tl.tensor, rows: tl.tensor, columns: tl.tensor
) -> tl.tensor:
    """[M, K]: offsets of the elements in a contiguous [E, rows, columns]."""
    return (matrix * rows + row_M[:, None]) * columns + column_K[None, :]


@triton.jit
def inside(row_M: tl.tensor, column_K: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """[M, K]: which elements are in the matrix."""
    return (row_M[:, None] < rows) & (column_K[None, :] < columns)


@triton.jit
def load_values(
    x_ptr: tl.tensor,
    matrix: tl.tensor,
    row_M: tl.tensor,
    column_K: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride_matrix: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
) -> tl.tensor:
    """[M, K] float32 of a tensor with these strides; 0 from `rows` and `columns` on."""
    from_MK = strided(matrix, row_M, column_K, stride_matrix, stride_row, stride_column)
    return casts.to_float32(tl.load(x_ptr + from_MK, mask=inside(row_M, column_K, rows, columns), other=0))


@triton.jit
def store_values(
    y_ptr: tl.tensor,
    y: tl.tensor,
    matrix: tl.tensor,
    row_M: tl.tensor,
    column_K: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    TARGET: tl.constexpr,
) -> None:
    """Round a tile's float32 values, of any shape, to the dtype of y [E, rows, columns] and store them."""
    y_MK = casts.from_float32(tl.reshape(y, (row_M.shape[0], column_K.shape[0])), y_ptr.dtype.element_ty, TARGET)
    to_MK = contiguous(matrix, row_M, column_K, rows, columns)
    tl.store(y_ptr + to_MK, y_MK, mask=inside(row_M, column_K, rows, columns))


@triton.jit
def store_bytes(
    to_ptr: tl.tensor,
    byte: tl.tensor,
    matrix: tl.tensor,
    row_M: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Store a tile's bytes, of any shape, from `column` on in a contiguous uint8 [E, rows, columns]."""
    column_K = indices(column, COLUMNS)
    byte_MK = tl.reshape(byte.to(tl.uint8), (row_M.shape[0], COLUMNS))
    to_MK = contiguous(matrix, row_M, column_K, rows, columns)
    tl.store(to_ptr + to_MK, byte_MK, mask=inside(row_M, column_K, rows, columns))


@triton.jit
def load_bytes(
    from_ptr: tl.tensor,
    matrix: tl.tensor,
    row_M: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """[M, COLUMNS] uint8 from `column` on of a contiguous [E, rows, columns]; 0 beyond it."""
    column_K = indices(column, COLUMNS)
    from_MK = contiguous(matrix, row_M, column_K, rows, columns)
    return tl.load(from_ptr + from_MK, mask=inside(row_M, column_K, rows, columns), other=0)


@triton.jit
def spread(per_row_M1: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """One value a row, [M, 1] -> the same for each of the row's blocks, [N, 1]."""
    ROWS: tl.constexpr = per_row_M1.shape[0]
    return tl.reshape(tl.broadcast_to(per_row_M1, (ROWS, BLOCKS)), (ROWS * BLOCKS, 1))
