"""The arithmetic of a conversion, one tensor at a time: read, check, round, quantize or dequantize.

`convert` stores what comes out, `verify` compares it with what is stored: both do the same here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from lowprec.backends import dequantize, global_amax, quantize
from lowprec.checkpoint import NUMPY_DTYPES, checksum
from lowprec.checkpoint.files import Bytes
from lowprec.checkpoint.shards import as_bytes
from lowprec.dialects import get_dialect
from lowprec.errors import CheckpointError, FormatError
from lowprec.formats.base import Array
from lowprec.plan import FLOAT_DTYPES, Action, Step
from lowprec.qtensor import QTensor

from .hf import Checkpoint
from .report import Conversion

Sink = Callable[[int, Bytes], None]  # where a piece of the tensor begins, and its bytes

_PIECE = 1 << 18  # elements looked at together: they and their temporary fit in a cache
_ALLOW = "repair the source, or give --allow-nonfinite to carry it over"

# safetensors dtype -> unsigned type of its width and the bits of +Inf; what is above, sign aside, is NaN.
_INFINITY: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = MappingProxyType(
    {
        "BF16": (np.uint16, 0x7F80),
        "F16": (np.uint16, 0x7C00),
        "F32": (np.uint32, 0x7F80_0000),
        "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    }
)


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
    """The tasks of a conversion, in the order in which their sources lie on the disk."""

    def position(task: Task) -> tuple[str, int]:
        return min(source.offset(info.name) for step in task.steps for info in step.source.parts.values())

    return tuple(sorted(group_tasks(conversion.plan.steps), key=position))


class Computer:
    """Computes the results of steps from an opened source. Holds no state; many threads may use it."""

    def __init__(self, source: Checkpoint, conversion: Conversion, *, allow_nonfinite: bool) -> None:
        self._source = source
        self._source_dialect = get_dialect(conversion.source_dialect)
        self._dialect = get_dialect(conversion.dialect)
        self._planned = conversion.outputs
        self._quantize_from = NUMPY_DTYPES[_code(conversion.contract.quantize_from)]
        self._dtype = conversion.contract.dtype
        self._allow_nonfinite = allow_nonfinite

    def shared_amax(self, task: Task) -> Array | None:
        """The global amax of a task's partners, read one at a time; None for a tensor without partners."""
        if len(task.steps) == 1:
            return None
        shared: Array | None = None
        for step in task.steps:
            assert step.weight is not None, "partners are quantized"
            weight = self._read_weight(step)
            amax = global_amax(weight.values.astype(self._quantize_from, copy=False), step.weight)
            assert amax is not None, "partners have a format with a global scale"
            shared = amax if shared is None else np.maximum(shared, amax)
        return shared

    def quantize(self, step: Step, amax: Array | None) -> Result:
        """Round to `quantize_from`, quantize, and spell in the target's dialect.

        Raises:
            CheckpointError: NaN or Inf in the source, unless allowed.
            FormatError: a value that the format, or `quantize_from`, turns into Inf.
        """
        assert step.weight is not None, "a step that quantizes has a format"
        weight = self._read_weight(step)
        tensor = quantize(weight.values.astype(self._quantize_from, copy=False), step.weight, amax=amax)
        largest = weight.largest if amax is None else max(weight.largest, float(np.max(amax, initial=0.0)))
        self._require_finite_result(step, tensor, largest)
        name = step.tensor.name
        arrays = {self._dialect.part_name(name, word): array for word, array in self._dialect.encode(tensor).items()}
        self._require_planned(name, arrays)
        return Result(arrays=arrays, checksums={"weight": weight.checksum}, values=weight.values)

    def dequantize(self, step: Step) -> Result:
        """The values of a quantized source tensor in the contract's dtype. Raises CheckpointError."""
        name, options = step.tensor.name, step.source.stored
        assert options is not None, "a step that dequantizes has a quantized source"
        arrays = {word: self._source.read(info.name) for word, info in step.source.parts.items()}
        sums = {word: checksum(as_bytes(array)) for word, array in arrays.items()}
        values = dequantize(self._source_dialect.decode(options, step.source.shape, arrays), self._dtype)
        if not self._allow_nonfinite and not is_finite(as_bytes(values), step.dtype):
            raise CheckpointError(f"tensor '{name}' decodes to NaN or Inf; {_ALLOW}")
        return Result(arrays={name: values}, checksums=sums)

    def copy(self, step: Step, sink: Sink) -> str:
        """Hand a kept tensor over piece by piece, and return its checksum.

        Raises:
            CheckpointError: NaN or Inf, unless allowed; what went to the sink before is then of no use.
        """
        digest = xxhash.xxh3_128()
        start = 0
        for piece in self._source.chunks(step.source.parts["weight"].name):
            if not self._allow_nonfinite and not is_finite(piece, step.dtype):
                raise CheckpointError(f"tensor '{step.tensor.name}' holds NaN or Inf; {_ALLOW}")
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
        if not self._allow_nonfinite:
            if not math.isfinite(largest):
                raise CheckpointError(f"tensor '{step.tensor.name}' holds NaN or Inf; {_ALLOW}")
            with np.errstate(over="ignore"):
                rounded = float(np.float64(largest).astype(self._quantize_from))
            if not math.isfinite(rounded):
                raise FormatError(
                    f"tensor '{step.tensor.name}': {largest:.4g} overflows {self._quantize_from.name}, from which the "
                    "contract quantizes; set quantize_from to a wider dtype, or keep its role"
                )
        return _Weight(values=values, largest=largest, checksum=checksum(as_bytes(values)))

    def _require_finite_result(self, step: Step, tensor: QTensor, largest: float) -> None:
        """Raises FormatError if a finite tensor decodes to Inf (spec/contract.md 1).

        A decoded value is less than twice `largest`, the maximum of the tensor and its partners, so only a tensor
        within a factor of four of the result dtype's maximum has to be decoded to know.
        """
        if not math.isfinite(largest) or 4 * largest < _LARGEST[self._dtype]:
            return
        if not is_finite(as_bytes(dequantize(tensor, self._dtype)), _code(self._dtype)):
            raise FormatError(
                f"tensor '{step.tensor.name}': its largest value {largest:.4g} decodes to Inf in {tensor.format}; "
                "keep its role or choose another recipe"
            )

    def _require_planned(self, name: str, arrays: Mapping[str, Array]) -> None:
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
    """The largest |x| of a float array, Inf or NaN if there are any; 0 of an empty one.

    Without their sign, floats are in the order of their bits, which is much quicker than comparing bfloat16 values.
    """
    unsigned, _ = _INFINITY[_code(values.dtype.name)]
    bits = as_bytes(values).view(unsigned)
    magnitude = unsigned(np.iinfo(unsigned).max >> 1)
    largest = max((int((bits[i : i + _PIECE] & magnitude).max()) for i in range(0, bits.size, _PIECE)), default=0)
    return float(np.array(largest, dtype=unsigned).view(values.dtype))


def is_finite(data: Bytes, dtype: str) -> bool:
    """Whether the bytes of a tensor hold neither NaN nor Inf; true for dtypes that are no plain floats."""
    if dtype not in _INFINITY:
        return True
    unsigned, infinity = _INFINITY[dtype]
    bits = data.view(unsigned)
    magnitude = unsigned(np.iinfo(unsigned).max >> 1)
    return all(int((bits[i : i + _PIECE] & magnitude).max()) < infinity for i in range(0, bits.size, _PIECE))


def run_step(
    computer: Computer, step: Step, amax: Array | None, sink_for: Callable[[str], Sink]
) -> tuple[dict[str, str], dict[str, str]]:
    """Do a step and hand its results to `sink_for(stored name)`; returns the source's and the results' checksums."""
    if step.action is Action.KEEP:
        digest = computer.copy(step, sink_for(step.tensor.name))
        return {"weight": digest}, {step.tensor.name: digest}
    result = computer.quantize(step, amax) if step.action is Action.QUANTIZE else computer.dequantize(step)
    outputs: dict[str, str] = {}
    for name, array in result.arrays.items():
        data = as_bytes(array)
        sink_for(name)(0, data)
        outputs[name] = checksum(data)
    return dict(result.checksums), outputs


def _code(dtype: str) -> str:
    """The safetensors name of a float dtype of numpy's name."""
    return next(code for code, name in FLOAT_DTYPES.items() if name == dtype)
