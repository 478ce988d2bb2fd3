"""A conversion's arithmetic stripe by stripe: rows are read, checked, quantized and written while they are in a cache.

One thread owns a tensor, or a group of partners, so the checksums run over its stripes in order. A thread holds one
stripe of a tensor and its results, and for formats with a global amax, which take two passes, the whole group as long
as it has at most CACHE bytes; a larger one is read twice. Every byte is that of `Computer`, which takes whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from lowprec.backends import dequantize_into, global_amax, quantize_into
from lowprec.checkpoint import NUMPY_DTYPES, checksum
from lowprec.checkpoint.shards import as_bytes
from lowprec.dialects import get_dialect
from lowprec.errors import CheckpointError
from lowprec.formats import get_format
from lowprec.formats.base import Array, ArraySpec, Layout, Options, Quantized, Shape
from lowprec.plan import Action, Step
from lowprec.qtensor import QTensor

from .buffers import Buffers
from .compute import ALLOW, Computer, Sink, Task, is_finite, largest_bits, largest_magnitude, magnitude_of
from .hf import Checkpoint
from .report import Conversion

STRIPE = 2 << 20  # bytes of the source at a time: a stripe, its codes and a second thread's fit in a shared cache
CACHE = 64 << 20  # bytes of a group that one thread keeps between two passes

_LARGEST_ITEM = 8  # bytes of one F64 or I64

SinkFor = Callable[[str], Sink]  # stored name -> where its pieces go
Checksums = dict[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What the first pass over a task gave: the global amax of all its tensors, and those that were kept, by name.

    A tensor that was kept stands with its largest |x|.
    """

    amax: Array | None = None
    kept: Mapping[str, tuple[Array, float]] = field(default_factory=dict)


class _Output:
    """One stored tensor that comes in order, piece by piece."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._digest = xxhash.xxh3_128()
        self._position = 0

    def write(self, array: Array) -> None:
        data = as_bytes(array)
        self._digest.update(data.data)
        self._sink(self._position, data)
        self._position += data.nbytes

    def checksum(self) -> str:
        return self._digest.hexdigest()


class StripeComputer:
    """Does the steps of a conversion from an opened source. Many threads may use it."""

    def __init__(
        self,
        source: Checkpoint,
        conversion: Conversion,
        *,
        allow_nonfinite: bool,
        stripe: int = STRIPE,
        cache: int = CACHE,
    ) -> None:
        """stripe: bytes of the source that are in hand at a time. cache: see `CACHE`. They change no byte."""
        self._source = source
        self._computer = Computer(source, conversion, allow_nonfinite=allow_nonfinite)
        self._source_dialect = get_dialect(conversion.source_dialect)
        self._dialect = get_dialect(conversion.dialect)
        self._dtype = self._computer.result_dtype
        self._allow_nonfinite = allow_nonfinite
        self._stripe = stripe
        self._cache = cache
        self._buffers = Buffers()
        self.source_checksums = self._computer.source_checksums

    def prepare(self, task: Task) -> Prepared:
        """The first pass over a task whose format has a global amax; nothing to do for others.

        Raises:
            CheckpointError, FormatError: as `Computer.quantize`.
        """
        if not all(self._is_cut(step) for step in task.steps):
            return Prepared(amax=self._computer.shared_amax(task))
        first = task.steps[0]
        if first.weight is None or get_format(first.weight.format).global_amax is None:
            return Prepared()
        places = self._places(task)
        kept: dict[str, tuple[Array, float]] = {}
        shared: Array | None = None
        for step in task.steps:
            assert step.weight is not None, "partners are quantized"
            place, largest = places.get(step.tensor.name), 0.0
            for values, most in self._read_rows(step, place):
                amax = global_amax(self._rounded(step, values), step.weight)
                shared = amax if shared is None else np.maximum(shared, amax)
                largest = float(np.maximum(largest, most))  # NaN stays
            if place is not None:
                kept[step.tensor.name] = (place, largest)
        return Prepared(amax=shared, kept=kept)

    def run(self, step: Step, prepared: Prepared, sink_for: SinkFor) -> tuple[Checksums, Checksums]:
        """Do a step and hand its results to `sink_for(stored name)`; returns the source's and the results' checksums.

        Raises:
            CheckpointError: NaN or Inf in the source, unless allowed.
            FormatError: a value that the format, or `quantize_from`, turns into Inf.
        """
        if step.action is Action.KEEP:
            count = max(self._stripe // _LARGEST_ITEM, 1) * _LARGEST_ITEM
            buffer = self._buffers.bytes("stripe", min(count, max(step.source.nbytes, 1)), self._path(step))
            digest = self._computer.copy(step, sink_for(step.tensor.name), buffer)
            return {"weight": digest}, {step.tensor.name: digest}
        if self._is_cut(step):
            if step.action is Action.QUANTIZE:
                return self._quantize(step, prepared, sink_for)
            return self._dequantize(step, sink_for)
        quantize = step.action is Action.QUANTIZE
        result = self._computer.quantize(step, prepared.amax) if quantize else self._computer.dequantize(step)
        return dict(result.checksums), _store_all(result.arrays, sink_for)

    # ---- quantize ----------------------------------------------------------------------------------------------

    def _quantize(self, step: Step, prepared: Prepared, sink_for: SinkFor) -> tuple[Checksums, Checksums]:
        options, name, path = step.weight, step.tensor.name, self._path(step)
        assert options is not None, "a step that quantizes has a format"
        fields = self._dialect.row_pieces(options)
        outputs = {word: _Output(sink_for(self._dialect.part_name(name, word))) for word in fields}
        digest = xxhash.xxh3_128()
        outer: Array | None = None
        for values, largest in self._rows(step, prepared):
            digest.update(as_bytes(values).data)
            out = self._results(get_format(options.format).layout(values.shape, options), path)
            quantize_into(self._rounded(step, values), options, out, prepared.amax)
            outer = out.global_scale
            tensor = QTensor(**out._asdict(), options=options, shape=values.shape)
            if not self._computer.decodes_finite(tensor, _with_amax(largest, prepared.amax)):
                self._refuse_result(step, prepared.amax)
            for word, which in fields.items():
                outputs[word].write(getattr(out, which))
        arrays = self._dialect.encode(_frame(options, step.source.shape, outer))
        self._computer.require_planned(name, {self._dialect.part_name(name, word): a for word, a in arrays.items()})
        others = {self._dialect.part_name(name, word): a for word, a in arrays.items() if word not in fields}
        sums = {self._dialect.part_name(name, word): output.checksum() for word, output in outputs.items()}
        return {"weight": digest.hexdigest()}, {**sums, **_store_all(others, sink_for)}

    def _results(self, layout: Layout, path: Path) -> Quantized:
        outer = layout.global_scale
        return Quantized(
            self._buffers.array("qdata", layout.qdata, path),
            self._buffers.array("scale", layout.scale, path),
            None if outer is None else np.empty(outer.shape, outer.dtype),
        )

    def _refuse_result(self, step: Step, amax: Array | None) -> None:
        """A stripe decodes to Inf. Raises FormatError, unless another one held NaN or Inf, and that was allowed."""
        largest = self._largest(step)
        if math.isfinite(largest):
            self._computer.refuse_result(step, _with_amax(largest, amax if step.partners else None))

    # ---- dequantize --------------------------------------------------------------------------------------------

    def _dequantize(self, step: Step, sink_for: SinkFor) -> tuple[Checksums, Checksums]:
        name, options, parts = step.tensor.name, step.source.stored, step.source.parts
        assert options is not None, "a step that dequantizes has a quantized source"
        fields = self._source_dialect.row_pieces(options)
        pieces = {word: info for word, info in parts.items() if word not in fields}
        others = {word: self._source.read(info.name) for word, info in pieces.items()}
        frame = _frame(options, step.source.shape, None)
        given = {word: getattr(frame, which) for word, which in fields.items()}
        outer = self._source_dialect.decode(options, step.source.shape, {**given, **others}).global_scale
        digests = {word: xxhash.xxh3_128() for word in fields}
        positions = dict.fromkeys(fields, 0)
        output = _Output(sink_for(name))
        for shape in self._stripes(step.source.shape, options, self._dtype.itemsize):
            arrays: dict[str, Array] = {}
            for word, which in fields.items():
                spec: ArraySpec = getattr(get_format(options.format).layout(shape, options), which)
                arrays[which] = self._buffers.array(which, spec, self._path(step))
                data = as_bytes(arrays[which])
                self._source.read_into(parts[word].name, positions[word], data)
                positions[word] += data.nbytes
                digests[word].update(data.data)
            values = self._buffers.array("stripe", ArraySpec(shape, self._dtype), self._path(step))
            dequantize_into(QTensor(**arrays, global_scale=outer, options=options, shape=shape), values)
            if not self._allow_nonfinite and not is_finite(as_bytes(values), step.dtype):
                raise CheckpointError(f"tensor '{name}' decodes to NaN or Inf; {ALLOW}")
            output.write(values)
        sums = {word: checksum(as_bytes(array)) for word, array in others.items()}
        return {**sums, **{word: digest.hexdigest() for word, digest in digests.items()}}, {name: output.checksum()}

    # ---- stripes -----------------------------------------------------------------------------------------------

    def _is_cut(self, step: Step) -> bool:
        """Whether a step that quantizes or dequantizes can be done in stripes: a matrix, row by row, of one amax."""
        options, dialect = step.source.stored, self._source_dialect
        if step.action is Action.QUANTIZE:
            options, dialect = step.weight, self._dialect
        shape = step.source.shape
        if options is None or len(shape) != 2 or not math.prod(shape) or not dialect.row_pieces(options):
            return False
        outer = get_format(options.format).layout(shape, options).global_scale
        return outer is None or outer.shape == ()

    def _stripes(self, shape: Shape, options: Options, itemsize: int) -> Iterator[Shape]:
        """Shapes of the stripes of a matrix: about as large as asked for, and never cutting a block."""
        rows, columns = shape
        step = max(self._stripe // (columns * itemsize) // options.row_alignment, 1) * options.row_alignment
        for row in range(0, rows, step):
            yield min(step, rows - row), columns

    def _rows(self, step: Step, prepared: Prepared) -> Iterator[tuple[Array, float]]:
        """The stripes of a plain weight with a bound of |x| in each, kept ones or read."""
        if step.tensor.name not in prepared.kept:
            yield from self._read_rows(step, None)
            return
        assert step.weight is not None, "a step that quantizes has a format"
        values, largest = prepared.kept[step.tensor.name]
        row = 0
        for rows, _ in self._stripes(values.shape, step.weight, values.itemsize):
            yield values[row : row + rows], largest
            row += rows

    def _read_rows(self, step: Step, place: Array | None) -> Iterator[tuple[Array, float]]:
        """Read the stripes of a plain weight, to where the whole of it has its place or one over the other.

        Yields each with its largest |x|. Raises CheckpointError or FormatError for one that may not be quantized.
        """
        info = step.source.parts["weight"]
        dtype = NUMPY_DTYPES[info.dtype]
        assert step.weight is not None, "a step that quantizes has a format"
        row = start = 0
        for shape in self._stripes(info.shape, step.weight, dtype.itemsize):
            values = place[row : row + shape[0]] if place is not None else None
            if values is None:
                values = self._buffers.array("stripe", ArraySpec(shape, dtype), self._path(step))
            self._source.read_into(info.name, start, as_bytes(values))
            largest = largest_magnitude(values)
            if not self._computer.is_sound(largest):
                self._computer.refuse_source(step, self._largest(step))
            yield values, largest
            row, start = row + shape[0], start + values.nbytes

    def _places(self, task: Task) -> dict[str, Array]:
        """Room for every tensor of a group, by name; none if the group is too large to be kept."""
        infos = {step.tensor.name: step.source.parts["weight"] for step in task.steps}
        total = sum(info.nbytes for info in infos.values())
        if total > self._cache:
            return {}
        block = self._buffers.bytes("kept", total, self._path(task.steps[0]))
        places: dict[str, Array] = {}
        for name, info in sorted(infos.items(), key=lambda item: -NUMPY_DTYPES[item[1].dtype].itemsize):  # all aligned
            places[name] = block[: info.nbytes].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
            block = block[info.nbytes :]
        return places

    def _rounded(self, step: Step, values: Array) -> Array:
        """The values in the dtype from which the contract quantizes."""
        dtype = self._computer.quantize_from
        if values.dtype == dtype:
            return values
        rounded = self._buffers.array("rounded", ArraySpec(values.shape, dtype), self._path(step))
        rounded[...] = values.astype(dtype)
        return rounded

    def _largest(self, step: Step) -> float:
        """The largest |x| of a whole plain weight, read for a message."""
        info = step.source.parts["weight"]
        dtype = NUMPY_DTYPES[info.dtype]
        bits = max((largest_bits(piece.view(dtype)) for piece in self._source.chunks(info.name)), default=0)
        return magnitude_of(bits, dtype)

    def _path(self, step: Step) -> Path:
        """The source's file of a step's first piece."""
        name = next(iter(step.source.parts.values())).name
        return self._source.shards[self._source.shard_of[name]].path


def _with_amax(largest: float, amax: Array | None) -> float:
    return largest if amax is None else max(largest, float(np.max(amax, initial=0.0)))


def _frame(options: Options, shape: Shape, outer: Array | None) -> QTensor:
    """A QTensor of the right dtypes and shapes, but without values in its row pieces, and without memory for them."""
    layout = get_format(options.format).layout(shape, options)
    qdata, scale = (np.broadcast_to(np.zeros((), spec.dtype), spec.shape) for spec in (layout.qdata, layout.scale))
    return QTensor(qdata=qdata, scale=scale, global_scale=outer, options=options, shape=shape)


def _store_all(arrays: Mapping[str, Array], sink_for: SinkFor) -> Checksums:
    """Hand whole tensors over, and return their checksums."""
    sums: Checksums = {}
    for name, array in arrays.items():
        data = as_bytes(array)
        sink_for(name)(0, data)
        sums[name] = checksum(data)
    return sums
