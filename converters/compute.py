"""The arithmetic of a conversion, one tensor at a time: read, check, round, quantize or dequantize.

`verify` compares what comes out with what is stored. `convert` does the same stripe by stripe (stripes.py), and leaves
to this file the tensors that cannot be cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import xxhash

from lowprec.backends import dequantize, global_amax, quantize
from lowprec.checkpoint import NUMPY_DTYPES, checksum
from lowprec.checkpoint.files import Bytes
from lowprec.checkpoint.shards import as_bytes
from lowprec.dialects import get_dialect
from lowprec.errors import CheckpointError, FormatError
from lowprec.formats.base import Array
from lowprec.plan import FLOAT_DTYPES, Step
from lowprec.qtensor import QTensor

from .hf import Checkpoint
from .report import Conversion

Sink = Callable[[int, Bytes], None]  # where a piece of the tensor begins, and its bytes

ALLOW = "repair the source, or give --allow-nonfinite to carry it over"

# safetensors dtype -> unsigned type of its width and the bits of +Inf; what is above, sign aside, is NaN.
_INFINITY: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = MappingProxyType(
    {
        "BF16": (np.uint16, 0x7F80),
        "F16": (np.uint16, 0x7C00),
        "F32": (np.uint32, 0x7F80_0000),
        "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    }
)

_CODES = MappingProxyType({NUMPY_DTYPES[code].name: code for code in _INFINITY})

# float dtype -> its largest finite value: one step of its bits below Inf.
_LARGEST: Mapping[str, float] = MappingProxyType(
    {
        name: float(np.array(_INFINITY[code][1] - 1, dtype=_INFINITY[code][0]).view(NUMPY_DTYPES[code]))
        for code, name in FLOAT_DTYPES.items()
    }
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Steps that are done together: one, or the partners that share one global amax."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Weight:
    """A plain weight that was read: its values, the largest |x| (Inf or NaN if there are any), its checksum."""

    values: Array
    largest: float
    checksum: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """A computed tensor.

    arrays: what is stored, by stored name. checksums: of the source's pieces, by the dialect's words. values: the
    source's values of a quantized tensor, as they are stored, before `quantize_from`.
    """

    arrays: Mapping[str, Array]
    checksums: Mapping[str, str]
    values: Array | None = None


def group_tasks(steps: Sequence[Step]) -> tuple[Task, ...]:
    """Every step in exactly one task, with its partners, in the order of the steps."""
    by_name = {step.tensor.name: step for step in steps}
    groups = dict.fromkeys(step.partners or (step.tensor.name,) for step in steps)
    return tuple(Task(steps=tuple(by_name[name] for name in names)) for names in groups)


def make_tasks(conversion: Conversion, source: Checkpoint) -> tuple[Task, ...]:
    """The tasks of a conversion, the largest first, so that all threads end together; else in the disk's order."""

    def key(task: Task) -> tuple[int, tuple[str, int]]:
        parts = [info for step in task.steps for info in step.source.parts.values()]
        return -sum(info.nbytes for info in parts), min(source.offset(info.name) for info in parts)

    return tuple(sorted(group_tasks(conversion.plan.steps), key=key))


class Computer:
    """Computes the results of steps from an opened source. Holds no state; many threads may use it."""

    def __init__(self, source: Checkpoint, conversion: Conversion, *, allow_nonfinite: bool) -> None:
        self._source = source
        self._source_dialect = get_dialect(conversion.source_dialect)
        self._dialect = get_dialect(conversion.dialect)
        self._planned = conversion.outputs
        self.quantize_from = NUMPY_DTYPES[_code(conversion.contract.quantize_from)]
        self.result_dtype = NUMPY_DTYPES[_code(conversion.contract.dtype)]
        self._allow_nonfinite = allow_nonfinite

    def shared_amax(self, task: Task) -> Array | None:
        """The global amax of a task's partners, read one at a time; None for a tensor without partners."""
        if len(task.steps) == 1:
            return None
        shared: Array | None = None
        for step in task.steps:
            assert step.weight is not None, "partners are quantized"
            weight = self._read_weight(step)
            amax = global_amax(weight.values.astype(self.quantize_from, copy=False), step.weight)
            assert amax is not None, "partners have a format with a global scale"
            shared = amax if shared is None else np.maximum(shared, amax)
        return shared

    def quantize(self, step: Step, amax: Array | None) -> Result:
        """Round to `quantize_from`, quantize, and spell in the target's dialect: the whole tensor at once.

        Raises:
            CheckpointError: NaN or Inf in the source, unless allowed.
            FormatError: a value that the format, or `quantize_from`, turns into Inf.
        """
        assert step.weight is not None, "a step that quantizes has a format"
        weight = self._read_weight(step)
        tensor = quantize(weight.values.astype(self.quantize_from, copy=False), step.weight, amax=amax)
        largest = weight.largest if amax is None else max(weight.largest, float(np.max(amax, initial=0.0)))
        if not self.decodes_finite(tensor, largest):
            self.refuse_result(step, largest)
        name = step.tensor.name
        arrays = {self._dialect.part_name(name, word): array for word, array in self._dialect.encode(tensor).items()}
        self.require_planned(name, arrays)
        return Result(arrays=arrays, checksums={"weight": weight.checksum}, values=weight.values)

    def dequantize(self, step: Step) -> Result:
        """The values of a quantized source tensor in the contract's dtype. Raises CheckpointError."""
        name, options = step.tensor.name, step.source.stored
        assert options is not None, "a step that dequantizes has a quantized source"
        arrays = {word: self._source.read(info.name) for word, info in step.source.parts.items()}
        sums = {word: checksum(as_bytes(array)) for word, array in arrays.items()}
        values = dequantize(self._source_dialect.decode(options, step.source.shape, arrays), self.result_dtype)
        if not self._allow_nonfinite and not is_finite(as_bytes(values), step.dtype):
            raise CheckpointError(f"tensor '{name}' decodes to NaN or Inf; {ALLOW}")
        return Result(arrays={name: values}, checksums=sums)

    def copy(self, step: Step, sink: Sink, buffer: Bytes | None = None) -> str:
        """Hand a kept tensor over piece by piece, each in `buffer` if there is one, and return its checksum.

        Raises:
            CheckpointError: NaN or Inf, unless allowed; what went to the sink before is then of no use.
        """
        digest = xxhash.xxh3_128()
        start = 0
        for piece in self._source.chunks(step.source.parts["weight"].name, buffer):
            if not self._allow_nonfinite and not is_finite(piece, step.dtype):
                raise CheckpointError(f"tensor '{step.tensor.name}' holds NaN or Inf; {ALLOW}")
            digest.update(piece.data)
            sink(start, piece)
            start += piece.nbytes
        return digest.hexdigest()

    def source_checksums(self, step: Step) -> dict[str, str]:
        """The checksums of a step's source, read again."""
        return {word: checksum_of(self._source.chunks(info.name)) for word, info in step.source.parts.items()}

    def _read_weight(self, step: Step) -> _Weight:
        """A plain weight. Raises CheckpointError for NaN or Inf, FormatError if rounding would make some."""
        values = self._source.read(step.source.parts["weight"].name)
        largest = largest_magnitude(values)
        if not self.is_sound(largest):
            self.refuse_source(step, largest)
        return _Weight(values=values, largest=largest, checksum=checksum(as_bytes(values)))

    def is_sound(self, largest: float) -> bool:
        """Whether a weight, or a part of one, whose largest |x| is `largest` may be quantized."""
        if self._allow_nonfinite:
            return True
        with np.errstate(over="ignore"):
            return math.isfinite(largest) and math.isfinite(float(np.float64(largest).astype(self.quantize_from)))

    def refuse_source(self, step: Step, largest: float) -> NoReturn:
        """Raises what there is to say of a weight that is not sound: CheckpointError or FormatError."""
        if not math.isfinite(largest):
            raise CheckpointError(f"tensor '{step.tensor.name}' holds NaN or Inf; {ALLOW}")
        raise FormatError(
            f"tensor '{step.tensor.name}': {largest:.4g} overflows {self.quantize_from.name}, from which the "
            "contract quantizes; set quantize_from to a wider dtype, or keep its role"
        )

    def decodes_finite(self, tensor: QTensor, largest: float) -> bool:
        """Whether a finite tensor, or stripe, decodes to finite values (spec/contract.md 1); true if it is not finite.

        A decoded value is less than twice `largest`, the maximum of the tensor and its partners, so only a tensor
        within a factor of four of the result dtype's maximum has to be decoded to know.
        """
        if not math.isfinite(largest) or 4 * largest < _LARGEST[self.result_dtype.name]:
            return True
        return is_finite(as_bytes(dequantize(tensor, self.result_dtype)), _code(self.result_dtype.name))

    def refuse_result(self, step: Step, largest: float) -> NoReturn:
        """Raises FormatError for a tensor that decodes to Inf."""
        assert step.weight is not None, "a step that quantizes has a format"
        raise FormatError(
            f"tensor '{step.tensor.name}': its largest value {largest:.4g} decodes to Inf in {step.weight.format}; "
            "keep its role or choose another recipe"
        )

    def require_planned(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Raises FormatError unless the dialect made exactly the tensors that it promised, in dtype and shape."""
        made = {stored: (array.dtype, array.shape) for stored, array in arrays.items()}
        planned = {info.name: (NUMPY_DTYPES[info.dtype], info.shape) for info in self._planned[name]}
        if made != planned:
            raise FormatError(f"tensor '{name}': dialect {self._dialect.name} promised {planned} but made {made}")


def checksum_of(pieces: Iterable[Bytes]) -> str:
    """xxh3-128 of bytes that come in pieces."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece.data)
    return digest.hexdigest()


def largest_magnitude(values: Array) -> float:
    """The largest |x| of a float array, Inf or NaN if there are any; 0 of an empty one."""
    return magnitude_of(largest_bits(values), values.dtype)


def largest_bits(values: Array) -> int:
    """The bits of the largest |x| of a contiguous float array: of NaN if there is one, else of Inf if there is one.

    Without their sign, floats are in the order of their bits, which is much quicker than comparing bfloat16 values.
    The largest of all bits as unsigned numbers is that of the negative values, as signed numbers of the positive ones.
    """
    unsigned, _ = _INFINITY[_code(values.dtype.name)]
    bits = values.reshape(-1).view(unsigned)
    sign = np.iinfo(unsigned).max // 2 + 1
    positive = int(bits.view(f"i{bits.itemsize}").max(initial=0))
    negative = int(bits.max(initial=0))
    return max(positive, negative - sign)


def magnitude_of(bits: int, dtype: np.dtype[Any]) -> float:
    """The value of bits without a sign."""
    unsigned, _ = _INFINITY[_code(dtype.name)]
    return float(np.array(bits, dtype=unsigned).view(dtype))


def is_finite(data: Bytes, dtype: str) -> bool:
    """Whether the bytes of a tensor hold neither NaN nor Inf; true for dtypes that are no plain floats."""
    return dtype not in _INFINITY or largest_bits(data.view(NUMPY_DTYPES[dtype])) < _INFINITY[dtype][1]


def _code(dtype: str) -> str:
    """The safetensors name of a float dtype of numpy's name."""
    return _CODES[dtype]
