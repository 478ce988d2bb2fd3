"""The part of `verify` that reads tensors: checksums, scales, partners, and what the source gives."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowprec.backends import dequantize
from lowprec.checkpoint import Manifest, ShardReader, TensorRecord, checksum
from lowprec.checkpoint.files import Bytes
from lowprec.checkpoint.shards import as_bytes
from lowprec.dialects import get_dialect
from lowprec.errors import CheckpointError, LowprecError
from lowprec.formats.base import Array
from lowprec.plan import Action, Step
from lowprec.qtensor import QTensor

from .compute import Computer, Task, checksum_of, group_tasks
from .faults import FaultKind, Faults
from .hf import Checkpoint
from .meter import Meter
from .report import Conversion, Phase, RoleError
from .scales import scale_faults

_PIECE = 1 << 16  # elements of float64 at a time, so that they stay in a cache


@dataclass(frozen=True, kw_only=True)
class _Error:
    """Sums over one tensor: of (x - d)^2 and x^2, and the largest |x - d| and |x|."""

    noise: float
    signal: float
    largest_error: float
    largest: float


class TensorChecks:
    """Checks of every tensor of a target; `do` may run in many threads."""

    def __init__(
        self,
        manifest: Manifest,
        conversion: Conversion,
        readers: Mapping[str, ShardReader],
        source: Checkpoint | None,
        faults: Faults,
        meter: Meter,
    ) -> None:
        self.conversion = conversion
        self.tasks = group_tasks(conversion.plan.steps)
        self._records = {record.source.name: record for record in manifest.tensors}
        self._readers = readers
        self._dialect = get_dialect(conversion.dialect)
        self._faults = faults
        self._meter = meter
        self._source = None if source is None else source.infos()
        # NaN and Inf are no fault here: the target may have been made with --allow-nonfinite.
        self._computer = None if source is None else Computer(source, conversion, allow_nonfinite=True)
        self._errors: dict[str, _Error] = {}
        self._lock = threading.Lock()

    def do(self, task: Task) -> None:
        """Check one tensor, or one group of partners."""
        present = [step for step in task.steps if self._is_present(step)]
        tensors = {step.tensor.name: self._check_stored(step) for step in present}
        self._check_partners(tensors)
        if self._computer is not None:
            self._check_source(self._computer, task, present, tensors)
        for step in task.steps:
            size = sum(info.nbytes for info in self.conversion.outputs[step.tensor.name])
            self._meter.report(Phase.VERIFY, step.tensor.name, size)

    def errors(self) -> tuple[RoleError, ...]:
        """The error of each role, over the tensors that were quantized; added up in the order of the plan."""
        roles: dict[str, list[_Error]] = {}
        for step in self.conversion.plan.steps:
            if step.tensor.name in self._errors:
                roles.setdefault(step.tensor.role, []).append(self._errors[step.tensor.name])
        return tuple(_role_error(role, members) for role, members in sorted(roles.items()))

    def _is_present(self, step: Step) -> bool:
        """Whether all that is stored for a step has the right dtype and shape; if not, that was found before."""
        return all(info.name in self._readers for info in self.conversion.outputs[step.tensor.name])

    def _check_stored(self, step: Step) -> QTensor | None:
        """Checksums, and for a quantized tensor its scales; returns it if it could be decoded."""
        record = self._records[step.tensor.name]
        recorded = {stored.info.name: stored.xxh3_128 for stored in record.outputs}
        try:
            if step.action is not Action.QUANTIZE:
                name = step.tensor.name
                self._check_checksum(name, checksum_of(self._chunks(name)), recorded)
                return None
            arrays: dict[str, Array] = {}
            for info in self.conversion.outputs[step.tensor.name]:
                arrays[info.name] = self._readers[info.name].read(info.name)
                self._check_checksum(info.name, checksum(as_bytes(arrays[info.name])), recorded)
            tensor = self._decode(step, arrays)
            for what in scale_faults(tensor):
                self._faults.add(FaultKind.SCALE, step.tensor.name, what)
            return tensor
        except LowprecError as error:
            self._faults.add(FaultKind.TENSOR, step.tensor.name, str(error))
            return None

    def _check_checksum(self, name: str, digest: str, recorded: Mapping[str, str]) -> None:
        if name in recorded and digest != recorded[name]:
            self._faults.add(FaultKind.CHECKSUM, name, "its bytes are not those that were written")

    def _chunks(self, name: str) -> Iterator[Bytes]:
        return self._readers[name].chunks(name)

    def _decode(self, step: Step, arrays: Mapping[str, Array]) -> QTensor:
        assert step.weight is not None, "a step that quantizes has a format"
        words = {
            word: arrays[self._dialect.part_name(step.tensor.name, word)]
            for word in self._dialect.parts(step.weight, step.source.shape)
        }
        tensor = self._dialect.decode(step.weight, step.source.shape, words)
        tensor.validate()
        return tensor

    def _check_partners(self, tensors: Mapping[str, QTensor | None]) -> None:
        """Engines take the global scale of one partner for all."""
        first: tuple[str, bytes] | None = None
        for name, tensor in tensors.items():
            if tensor is None or tensor.global_scale is None or len(tensors) == 1:
                continue
            scale = np.asarray(tensor.global_scale)
            first = first or (name, scale.tobytes())
            if scale.tobytes() != first[1]:
                self._faults.add(FaultKind.PARTNERS, name, f"its global scale is not that of its partner '{first[0]}'")

    def _check_source(
        self, computer: Computer, task: Task, present: Sequence[Step], tensors: Mapping[str, QTensor | None]
    ) -> None:
        """Do the task again and compare every byte."""
        try:
            for step in task.steps:
                self._require_source(step)
            amax = computer.shared_amax(task)
            for step in present:
                if step.action is Action.KEEP:
                    self._compare_kept(computer, step)
                else:
                    self._compare_computed(computer, step, amax, tensors[step.tensor.name])
        except LowprecError as error:
            self._faults.add(FaultKind.SOURCE, task.steps[0].tensor.name, str(error))

    def _require_source(self, step: Step) -> None:
        """Raises CheckpointError unless the source has the step's pieces in the recorded dtype and shape."""
        assert self._source is not None, "only called with a source"
        for info in step.source.parts.values():
            if self._source.get(info.name) != info:
                raise CheckpointError(f"the source has no '{info.name}' of {info.dtype} {list(info.shape)}")

    def _compare_kept(self, computer: Computer, step: Step) -> None:
        name = step.tensor.name
        stored = self._chunks(name)

        def compare(start: int, data: Bytes) -> None:
            self._compare(name, start, next(stored), data)

        self._check_read(step, {"weight": computer.copy(step, compare)})

    def _compare_computed(self, computer: Computer, step: Step, amax: Array | None, tensor: QTensor | None) -> None:
        quantized = step.action is Action.QUANTIZE
        result = computer.quantize(step, amax) if quantized else computer.dequantize(step)
        self._check_read(step, result.checksums)
        for name, array in result.arrays.items():
            data = as_bytes(array)
            start = 0
            for piece in self._chunks(name):
                self._compare(name, start, piece, data[start : start + piece.nbytes])
                start += piece.nbytes
        if tensor is not None and result.values is not None:
            error = _measure(result.values, dequantize(tensor, "float32"))
            with self._lock:
                self._errors[step.tensor.name] = error

    def _check_read(self, step: Step, digests: Mapping[str, str]) -> None:
        """The source's bytes are those that the conversion read."""
        record: TensorRecord = self._records[step.tensor.name]
        for word, digest in digests.items():
            if record.checksums.get(word) != digest:
                name = step.source.parts[word].name
                self._faults.add(FaultKind.SOURCE, name, "its bytes in the source are not those that were converted")

    def _compare(self, name: str, start: int, stored: Bytes, expected: Bytes) -> None:
        differing = np.flatnonzero(stored != expected)
        if differing.size:
            at = int(differing[0])
            self._faults.add(
                FaultKind.BYTES,
                name,
                f"byte {start + at} is {int(stored[at]):#04x}, the source gives {int(expected[at]):#04x}; "
                f"{differing.size} of {stored.size} bytes from {start} on differ",
            )


@np.errstate(invalid="ignore")  # Inf - Inf, where both were allowed
def _measure(values: Array, decoded: Array) -> _Error:
    """The error of one tensor in float64, a piece at a time."""
    x, d = values.reshape(-1), decoded.reshape(-1)
    noise = signal = largest_error = largest = 0.0
    for begin in range(0, x.size, _PIECE):
        piece = x[begin : begin + _PIECE].astype(np.float64)
        error = piece - d[begin : begin + _PIECE]
        noise += float(np.square(error).sum())
        signal += float(np.square(piece).sum())
        largest_error = max(largest_error, float(error.max()), -float(error.min()))
        largest = max(largest, float(piece.max()), -float(piece.min()))
    return _Error(noise=noise, signal=signal, largest_error=largest_error, largest=largest)


def _role_error(role: str, members: Sequence[_Error]) -> RoleError:
    noise = math.fsum(error.noise for error in members)
    signal = math.fsum(error.signal for error in members)
    ratio = signal / noise if noise else math.inf
    relative = (error.largest_error / error.largest if error.largest else 0.0 for error in members)
    return RoleError(
        role=role,
        tensors=len(members),
        sqnr_db=10 * math.log10(ratio) if ratio > 0 else -math.inf,
        max_relative_error=max(relative),
    )
