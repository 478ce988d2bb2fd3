"""QTensor: a quantized tensor and everything needed to read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import FormatError
from .formats import get_format
from .formats.base import Array, ArraySpec, Options, Quantized, Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class QTensor:
    """A quantized tensor of logical shape [.., M, K].

    Invariants, checked by `validate`: the shapes and dtypes of `qdata`, `scale` and `global_scale` are
    `get_format(options.format).layout(shape, options)`; the arrays are C-contiguous numpy arrays, or all torch
    tensors where the input was one. Row-major plain checkpoint layout, never swizzled.
    """

    qdata: Array
    scale: Array
    global_scale: Array | None
    options: Options
    shape: Shape

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.options.format

    @property
    def arrays(self) -> Quantized:
        """The three arrays, as the reference functions take them."""
        return Quantized(self.qdata, self.scale, self.global_scale)
