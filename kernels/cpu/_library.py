"""The compiled library: found, checked, loaded, and called with numpy arrays.

Its functions take matrices as pointer and stride (see _native.c), so arrays [.., M, K] are cut into them here.
ctypes releases the GIL during a call: threads work on different tensors or stripes at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from lowprec.errors import BackendError, FormatError
from lowprec.formats.base import INPUT_DTYPES, Array, ArraySpec, Layout, Quantized, Shape, check_input

from . import _build

Arguments = tuple[Any, ...]  # of a C function

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_native.so")
_REMEDY = "reinstall lowprec where a C compiler is (pip install -v shows why a build failed)"

# enum dtype of _tiles.h, in the order of INPUT_DTYPES
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(INPUT_DTYPES)}

_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_MATRIX = (_POINTER, _LONG)
_SIZE = (_LONG, _LONG)
_INPUT = (_INT, *_MATRIX, *_SIZE)  # dtype, x, its stride, rows, cols
_CODES = (*_MATRIX, *_MATRIX)  # q and scale
_DECODED = (*_SIZE, _INT, *_MATRIX)  # rows, cols, dtype, y

_OPTIONS: dict[str, Arguments] = {
    "fp8_block": (_INT, _INT, _LONG, _LONG),  # rule, pow2, block_rows, block_cols
    "mx": (_INT, _INT),  # element, rule
    "nvfp4": (_INT, _INT, _INT, _POINTER, _LONG),  # tile, choice, e4m3_max, amax, amax_step
    "int4_group": (_INT, _LONG),  # half_steps, group
}
_DECODE_OPTIONS: dict[str, Arguments] = {
    "fp8_block": (_LONG, _LONG),
    "mx": (_INT,),
    "nvfp4": (_POINTER, _LONG),  # global_scale, global_step
    "int4_group": (_LONG,),
}


def status() -> str:
    """The instruction set that the kernels use here. Raises BackendError with the reason where there are none."""
    name: str = load().lowprec_instruction_set().decode()
    return name


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not os.path.exists(LIBRARY):
        return "it was not built"
    try:
        library = ctypes.CDLL(LIBRARY)
        library.lowprec_digest.restype = ctypes.c_char_p
        built_from: str = library.lowprec_digest().decode()
    except (OSError, AttributeError) as error:
        return f"it cannot be loaded: {error}"
    if _build.sources() and built_from != _build.digest():
        return "it was built from other sources than those beside it"
    _declare(library)
    return library


def load() -> ctypes.CDLL:
    """The library with its argument types declared.

    Raises:
        BackendError: it was not built, cannot be loaded, or was built from other sources than those beside it.
    """
    library = _load()
    if isinstance(library, str):
        raise BackendError(f"no compiled CPU kernels: {library} ({LIBRARY}); {_REMEDY}")
    return library


def _declare(library: ctypes.CDLL) -> None:
    arguments = {
        "row_amax": (*_INPUT, _POINTER),
        "nvfp4_global_scale": (_INT, _POINTER, _LONG, _POINTER),
    }
    for name, options in _OPTIONS.items():
        arguments[f"{name}_quantize"] = (*options, *_INPUT, *_CODES)
        arguments[f"{name}_fake_quantize"] = (*options, *_INPUT, *_MATRIX)
        arguments[f"{name}_dequantize"] = (*_DECODE_OPTIONS[name], *_CODES, *_DECODED)
    for name, types in arguments.items():
        function = getattr(library, f"lowprec_{name}")
        function.argtypes, function.restype = types, None
    library.lowprec_instruction_set.restype = ctypes.c_char_p


# ---- arrays ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The compiled functions of a format, on arrays [.., M, K].

    `arguments` are the format's options as its C functions take them. `outer` is a float32 array [..] or [.., M]
    that belongs to them: NVFP4's global amax, or its global scale when decoding.

    Raises:
        BackendError: on creation, if the library is not there. So a format's module imports only where it works.
        FormatError: an input or arrays of another dtype or shape than the format's; the C side trusts them.
    """

    name: str
    symbol: str
    library: ctypes.CDLL = field(default_factory=load)

    def quantize(self, x: Array, layout: Layout, arguments: Arguments, outer: Array | None = None) -> Quantized:
        """Into new arrays; a global scale is the caller's to fill in."""
        qdata, scale, global_scale = layout
        out = Quantized(
            np.empty(qdata.shape, qdata.dtype),
            np.empty(scale.shape, scale.dtype),
            None if global_scale is None else np.empty(global_scale.shape, global_scale.dtype),
        )
        self.quantize_into(x, out, layout, arguments, outer)
        return out

    def quantize_into(
        self, x: Array, out: Quantized, layout: Layout, arguments: Arguments, outer: Array | None = None
    ) -> None:
        """Into arrays of `layout`, which may be parts of larger ones."""
        check_input(self.name, x)
        self._check(out, layout)
        for array, spec in zip(out[:2], layout[:2], strict=True):
            self._check_result(array, spec)
        function = getattr(self.library, f"lowprec_{self.symbol}_quantize")
        x = rows_contiguous(x)
        for more, from_x, to_qdata, to_scale in _matrices(outer, x, out.qdata, out.scale):
            function(*arguments, *more, *_input(x, from_x), *to_qdata, *to_scale)

    def fake_quantize_into(self, x: Array, y: Array, arguments: Arguments, outer: Array | None = None) -> None:
        """Into an array of the shape and dtype of `x`."""
        check_input(self.name, x)
        self._check_result(y, ArraySpec(x.shape, x.dtype))
        function = getattr(self.library, f"lowprec_{self.symbol}_fake_quantize")
        x = rows_contiguous(x)
        for more, from_x, to_y in _matrices(outer, x, y):
            function(*arguments, *more, *_input(x, from_x), *to_y)

    def dequantize(self, quantized: Quantized, shape: Shape, layout: Layout, arguments: Arguments, dtype: Any) -> Array:
        """The values [.., M, K] in `dtype`; through float32 where the library does not know it."""
        wanted = np.dtype(dtype)
        y = np.empty(shape, wanted if wanted in _DTYPE_CODES else np.float32)
        self.dequantize_into(quantized, y, layout, arguments)
        return y.astype(wanted, copy=False)

    def dequantize_into(self, quantized: Quantized, y: Array, layout: Layout, arguments: Arguments) -> None:
        """Into an array [.., M, K] of an input dtype."""
        self._check(quantized, layout)
        self._check_result(y, ArraySpec(y.shape, y.dtype if y.dtype in _DTYPE_CODES else np.dtype(np.float32)))
        function = getattr(self.library, f"lowprec_{self.symbol}_dequantize")
        qdata, scale = rows_contiguous(quantized.qdata), rows_contiguous(quantized.scale)
        for more, from_qdata, from_scale, to_y in _matrices(quantized.global_scale, qdata, scale, y):
            function(*arguments, *more, *from_qdata, *from_scale, *y.shape[-2:], _DTYPE_CODES[y.dtype], *to_y)

    def _check(self, arrays: Quantized, layout: Layout) -> None:
        for what, array, spec in zip(Quantized._fields, arrays, layout, strict=True):
            if spec is None:
                continue
            if array is None:
                raise FormatError(f"{self.name}: {what} is missing, pass all three arrays")
            if (array.shape, array.dtype) != spec:
                raise FormatError(
                    f"{self.name}: {what} is {array.dtype.name} {list(array.shape)}, "
                    f"it must be {spec.dtype.name} {list(spec.shape)}"
                )

    def _check_result(self, array: Array, spec: ArraySpec) -> None:
        if (array.shape, array.dtype) != spec or not array.flags.writeable or rows_contiguous(array) is not array:
            raise FormatError(
                f"{self.name}: a result is {array.dtype.name} {list(array.shape)} with strides {list(array.strides)}, "
                f"it must be writable, {spec.dtype.name} {list(spec.shape)}, the elements of a row side by side"
            )


def row_amax(x: Array) -> Array:
    """The largest |x| of each row, NaN ignored, 0 of an empty one: [.., M, K] -> float32 [.., M]."""
    library, x = load(), rows_contiguous(x)
    out = np.empty(x.shape[:-1], np.float32)
    for number, (_, from_x) in enumerate(_matrices(None, x)):
        library.lowprec_row_amax(*_input(x, from_x), _address(out) + number * x.shape[-2] * out.itemsize)
    return out


def nvfp4_global_scale(amax: Array, e4m3_max: int) -> Array:
    """The stored global scale fl(1/S) of global amaxes of any shape."""
    amax = np.asarray(amax, dtype=np.float32, order="C")
    out = np.empty_like(amax)
    load().lowprec_nvfp4_global_scale(e4m3_max, _address(amax), amax.size, _address(out))
    return out


def rows_contiguous(array: Array) -> Array:
    """The array, or a copy of it, with the elements of a row side by side; rows may lie anywhere."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return np.ascontiguousarray(array)


def _address(array: Array) -> int:
    """Of the first element. The caller keeps the array alive."""
    address: int = array.__array_interface__["data"][0]
    return address


def _input(x: Array, matrix: Arguments) -> Arguments:
    return (_DTYPE_CODES[x.dtype], *matrix, *x.shape[-2:])


def _matrices(outer: Array | None, *arrays: Array) -> Iterator[tuple[Arguments, ...]]:
    """For each matrix: (address, step) of its part of `outer`, and (address, stride) in each array [.., M, K]."""
    *lead, m, _ = arrays[0].shape
    if outer is not None:
        outer = np.asarray(outer, dtype=np.float32, order="C")
        step = int(outer.ndim > len(lead))
    for number, index in enumerate(np.ndindex(*lead)):
        more = () if outer is None else (_address(outer) + number * (m if step else 1) * outer.itemsize, step)
        where = [sum(i * stride for i, stride in zip(index, array.strides, strict=False)) for array in arrays]
        yield more, *((_address(array) + at, array.strides[-2]) for array, at in zip(arrays, where, strict=True))
