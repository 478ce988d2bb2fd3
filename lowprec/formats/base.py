"""What a format is: a name, its options, and two functions on numpy arrays.

Shape legend, used in every numeric file: E stacked experts (any number of leading dimensions),
M rows (output features), K columns (input features), G blocks along K.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import FormatError, did_you_mean

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
INPUT_DTYPES: tuple[np.dtype[Any], ...] = (
    np.dtype(np.float32),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
)


class Quantized(NamedTuple):
    """The three arrays of a quantized tensor; shapes and dtypes are those of `Format.layout`."""

    qdata: Array
    scale: Array
    global_scale: Array | None


class ArraySpec(NamedTuple):
    """Shape and numpy dtype of one of the three arrays."""

    shape: Shape
    dtype: np.dtype[Any]


class Layout(NamedTuple):
    """Shapes and dtypes of the three arrays for one logical shape."""

    qdata: ArraySpec
    scale: ArraySpec
    global_scale: ArraySpec | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of every format's options: a frozen record whose fields are bools, ints, tuples of ints or enums.

    `parse` and `to_json` are inverse; `to_json` always states every field, so a recipe and a digest
    never depend on a default. A field given as a plain value becomes what its annotation names, so that
    no comparison with an enum can fail silently.

    Raises:
        FormatError: a value that the option does not have; it names the option and the nearest right word.
    """

    format: ClassVar[str]

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _field_types(cls)
        for field in dataclasses.fields(self):
            value = _convert(self.format, field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)

    @property
    def row_alignment(self) -> int:
        """Rows that must stay together when a tensor is cut along M (1: any row may be cut off)."""
        return 1

    @property
    def column_alignment(self) -> int:
        """Columns that must stay together when a tensor is cut along K."""
        return 1

    def to_json(self) -> dict[str, Any]:
        """`{"format": name, option: value, ...}` with plain JSON values; None is spelled "none"."""
        out: dict[str, Any] = {"format": self.format}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, enum.Enum):
                value = value.value
            out[field.name] = "none" if value is None else list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> typing.Self:
        """Build the options from plain values. Raises FormatError naming the option and the nearest right word."""
        names = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in names:
                raise FormatError(f"{cls.format}: unknown option '{key}'{did_you_mean(key, names)}")
        return cls(**values)


@functools.cache
def _field_types(cls: type[Any]) -> dict[str, Any]:
    """The annotations of the fields, as types."""
    return typing.get_type_hints(cls)


def _convert(format_name: str, key: str, value: Any, hint: Any) -> Any:
    """One plain value as the type that the option's annotation names."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # `X | None`
        if value is None or value == "none":
            return None
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        words = [str(member.value) for member in hint]
        if isinstance(value, enum.Enum):
            value = value.value
        if value not in words:
            raise FormatError(f"{format_name}: {key} cannot be {value!r}{did_you_mean(str(value), words)}")
        return hint(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(type(item) is int and item > 0 for item in value):
            raise FormatError(f"{format_name}: {key} = {value!r} must be a list of positive integers")
        if len(value) != len(typing.get_args(hint)):
            raise FormatError(f"{format_name}: {key} = {value!r} must have {len(typing.get_args(hint))} numbers")
        return tuple(value)
    if type(value) is not hint:
        raise FormatError(f"{format_name}: {key} = {value!r} must be of type {hint.__name__}")
    return value


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format as data plus its readable numpy reference. One instance a file, called FORMAT.

    quantize(x, options, amax=None) -> Quantized
        x: [.., M, K] float32, float16 or bfloat16. amax: the global amax to use instead of the tensor's
        own, float32, shape of `global_amax`; only for formats that have a global scale.
    dequantize(quantized, options, dtype) -> [.., M, K] in dtype, one RNE from the exact rule's float32.
    codes(qdata) -> uint8 [.., M, K], one code an element.
    layout(shape, options) -> Layout. Raises FormatError if the shape cannot be held.
    global_amax(x, options) -> float32 [..] a matrix or [.., M] a row; None if the format has no global scale.
    describe(options) -> every rule that decides a bit, by name: part of the contract and of its digest.
    """

    name: str
    options: type[Any]
    quantize: Callable[[Array, Any, Array | None], Quantized]
    dequantize: Callable[[Quantized, Any, Any], Array]
    codes: Callable[[Array], Array]
    layout: Callable[[Shape, Any], Layout]
    describe: Callable[[Any], dict[str, Any]]
    global_amax: Callable[[Array, Any], Array] | None = None


def check_input(format_name: str, x: Array) -> None:
    """Raise FormatError unless `x` is [.., M, K] in float32, float16 or bfloat16."""
    if x.dtype not in INPUT_DTYPES:
        known = ", ".join(dtype.name for dtype in INPUT_DTYPES)
        raise FormatError(f"{format_name}: cannot quantize {x.dtype.name}, cast it to one of {known} first")
    check_shape(format_name, x.shape)


def check_shape(format_name: str, shape: Shape, *, rows: int = 1, columns: int = 1) -> None:
    """Raise FormatError unless `shape` is [.., M, K] with M a multiple of `rows` and K one of `columns`."""
    if len(shape) < 2:
        raise FormatError(f"{format_name}: shape {list(shape)} has no rows and columns, give a matrix [.., M, K]")
    for size, multiple, what in ((shape[-2], rows, "rows"), (shape[-1], columns, "columns")):
        if size % multiple:
            raise FormatError(
                f"{format_name}: {size} {what} in shape {list(shape)} are not a multiple of {multiple}, "
                "keep this tensor in high precision"
            )
