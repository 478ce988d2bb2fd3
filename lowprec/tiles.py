"""The numpy reference of any format, tile by tile, so that its temporaries stay in a core's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .formats.base import Array, ArraySpec, Format, Layout, Options, Quantized, Shape

TILE_ELEMENTS = 1 << 16  # 256 KiB of float32: a handful of temporaries fit in the second-level cache


class _Tile(NamedTuple):
    """Where a tile lies: the index of its matrix, its rows and its columns."""

    matrix: tuple[int, ...]
    rows: slice
    columns: slice

    @property
    def index(self) -> Any:
        """Index of the tile in an array [.., M, K]."""
        return (*self.matrix, self.rows, self.columns)

    def outer(self, array: Array) -> Any:
        """Index of the tile's part of an array [..] or [.., M]."""
        return (*self.matrix, self.rows)[: array.ndim]

    def piece(self, array: Array, begin: ArraySpec, size: Shape) -> Array:
        """The tile's part, of `size` [rows, columns], of a packed or scale array."""
        row, column = begin.shape
        out: Array = array[self.matrix][row : row + size[0], column : column + size[1]]
        return out


def _tiles(shape: Shape, options: Options) -> Iterator[_Tile]:
    """Tiles of about TILE_ELEMENTS that cut no block."""
    *lead, m, k = shape
    row_step = max(TILE_ELEMENTS // max(k, 1) // options.row_alignment, 1) * options.row_alignment
    column_step = k
    if row_step * k > TILE_ELEMENTS:
        wide = options.column_alignment
        column_step = max(TILE_ELEMENTS // row_step // wide, 1) * wide
    for index in np.ndindex(*lead):
        for row in range(0, m, row_step):
            for column in range(0, k, max(column_step, 1)):
                rows, columns = slice(row, min(row + row_step, m)), slice(column, min(column + column_step, k))
                yield _Tile(index, rows, columns)


def global_amax(fmt: Format, x: Array, options: Options) -> Array | None:
    """`fmt.global_amax` without temporaries of the tensor's size."""
    spec = fmt.layout(x.shape, options).global_scale
    if fmt.global_amax is None or spec is None:
        return None
    if x.size <= TILE_ELEMENTS:
        return np.asarray(fmt.global_amax(x, options))
    out = np.zeros(spec.shape, dtype=np.float32)
    for tile in _tiles(x.shape, options):
        where = tile.outer(out)
        out[where] = np.maximum(out[where], fmt.global_amax(x[tile.index], options))
    return out


def _empty(layout: Layout) -> Quantized:
    qdata, scale, outer = layout
    return Quantized(
        np.empty(qdata.shape, qdata.dtype),
        np.empty(scale.shape, scale.dtype),
        None if outer is None else np.empty(outer.shape, outer.dtype),
    )


def quantize(
    fmt: Format, x: Array, options: Options, amax: Array | None = None, out: Quantized | None = None
) -> Quantized:
    """`fmt.quantize`, byte for byte, without temporaries of the tensor's size. Into `out` if it is given."""
    if amax is None:
        amax = global_amax(fmt, x, options)
    if x.size <= TILE_ELEMENTS and out is None:
        return fmt.quantize(x, options, amax)
    out = _empty(fmt.layout(x.shape, options)) if out is None else out
    for tile in _tiles(x.shape, options):
        given = None if amax is None else amax[tile.outer(amax)]
        part = fmt.quantize(np.ascontiguousarray(x[tile.index]), options, given)
        begin = fmt.layout((tile.rows.start, tile.columns.start), options)
        tile.piece(out.qdata, begin.qdata, part.qdata.shape)[...] = part.qdata
        tile.piece(out.scale, begin.scale, part.scale.shape)[...] = part.scale
        if out.global_scale is not None:
            out.global_scale[tile.outer(out.global_scale)] = part.global_scale
    return out


def dequantize(
    fmt: Format,
    arrays: Quantized,
    options: Options,
    shape: Shape,
    dtype: np.dtype[Any],
    out: Array | None = None,
) -> Array:
    """`fmt.dequantize`, byte for byte, without temporaries of the tensor's size. Into `out` if it is given."""
    if math.prod(shape) <= TILE_ELEMENTS and out is None:
        return fmt.dequantize(arrays, options, dtype)
    out = np.empty(shape, dtype) if out is None else out
    outer = arrays.global_scale
    for tile in _tiles(shape, options):
        rows, columns = tile.rows, tile.columns
        begin = fmt.layout((rows.start, columns.start), options)
        size = fmt.layout((rows.stop - rows.start, columns.stop - columns.start), options)
        part = Quantized(
            np.ascontiguousarray(tile.piece(arrays.qdata, begin.qdata, size.qdata.shape)),
            tile.piece(arrays.scale, begin.scale, size.scale.shape),
            None if outer is None else outer[tile.outer(outer)],
        )
        out[tile.index] = fmt.dequantize(part, options, dtype)
    return out
