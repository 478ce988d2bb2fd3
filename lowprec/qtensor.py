"""QTensor: a quantized tensor and everything needed to read it.

Its arrays are numpy arrays, or torch tensors where the input was one. Torch is never imported here: a torch
tensor can only arrive from a program that has imported it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .errors import FormatError
from .formats import get_format
from .formats.base import Array, ArraySpec, Options, Quantized, Shape

# Every dtype that an input or a piece can have, under the name that torch uses too.
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "uint8": np.uint8,
        "int32": np.int32,
    }.items()
}


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

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays together."""
        return sum(int(array.nbytes) for array in self.arrays if array is not None)

    def codes(self) -> Array:
        """One uint8 an element, [.., M, K]: the FP8 byte, the FP4 nibble, or the INT4 code + 8."""
        out: Array = like(get_format(self.format).codes(to_numpy(self.qdata)), self.qdata)
        return out

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            FormatError: names the first array that is wrong, what it is and what it must be.
        """
        layout = get_format(self.format).layout(self.shape, self.options)
        for name, array, spec in zip(Quantized._fields, self.arrays, layout, strict=True):
            _check(f"{self.format}: {name} of a tensor of shape {list(self.shape)}", array, spec)
        if len({is_torch(array) for array in self.arrays if array is not None}) > 1:
            raise FormatError(f"{self.format}: numpy arrays and torch tensors are mixed, give one kind")


def _check(what: str, array: Any, spec: ArraySpec | None) -> None:
    """Raise FormatError unless the array is there exactly when it must be, and is what `spec` says."""
    if spec is None or array is None:
        if spec is not None:
            raise FormatError(f"{what} is missing, it must be {spec.dtype.name} {list(spec.shape)}")
        if array is not None:
            raise FormatError(f"{what} must be None, this format has none")
        return
    found = ArraySpec(tuple(array.shape), dtype_of(array))
    if found != spec:
        raise FormatError(
            f"{what} is {found.dtype.name} {list(found.shape)}, it must be {spec.dtype.name} {list(spec.shape)}"
        )
    contiguous = array.is_contiguous() if is_torch(array) else array.flags.c_contiguous
    if not contiguous:
        raise FormatError(f"{what} is not contiguous, make a contiguous copy of it")


def is_torch(x: Any) -> bool:
    """Whether `x` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_of(x: Any) -> np.dtype[Any]:
    """The dtype of a numpy array or a torch tensor, as numpy's. Raises FormatError for one that is unknown here."""
    if isinstance(x, np.ndarray | np.generic):
        return np.dtype(x.dtype)
    name = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
    if name not in _DTYPES:
        raise FormatError(f"a {name} tensor cannot be used here, cast it to one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def to_numpy(x: Any) -> Array:
    """A numpy array of the same values: a view of a CPU tensor's memory, a copy of a device tensor."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    if not is_torch(x):
        raise FormatError(f"a {type(x).__name__} cannot be quantized, give a numpy array or a torch tensor")
    dtype = dtype_of(x)
    tensor = x.detach().cpu()
    if dtype.isbuiltin == 1:
        native: Array = tensor.numpy()
        return native
    torch = sys.modules["torch"]
    carrier: Array = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy()
    return carrier.view(dtype)


def like(array: Array, x: Any) -> Any:
    """`array` as what `x` is: itself, or a torch tensor on the device of `x`."""
    if not is_torch(x):
        return array
    torch = sys.modules["torch"]
    array = np.asarray(array, order="C")
    if array.dtype.kind != "V":  # torch knows it; `isbuiltin` would be 0 after a pickle
        return torch.from_numpy(array).to(x.device)
    carrier = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
    return torch.from_numpy(carrier).view(getattr(torch, array.dtype.name)).to(x.device)
