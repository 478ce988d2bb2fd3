"""Convert one checkpoint into another: plan it, compute each tensor once, store it, publish the whole."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lowprec.checkpoint import MANIFEST_NAME, FileRecord, Manifest, Stored, TensorRecord, checksum, read_bytes
from lowprec.checkpoint.files import Bytes
from lowprec.errors import CheckpointError
from lowprec.plan import Step

from .compute import Sink, Task, checksum_of, make_tasks
from .executors import count_workers, run_tasks
from .flush import Flusher
from .hf import CONFIG, INDEX, Checkpoint
from .identity import Identity
from .journal import Entry, Journal
from .meter import Meter, OnProgress
from .report import Conversion, ConvertReport, Phase
from .staging import Staging, Survey
from .stripes import Prepared, StripeComputer

# What manifest, index and journal together take for one tensor, generously; only for the check of free space.
_RECORD_BYTES = 4000


@dataclass
class _Counts:
    """What a run did."""

    written: int = 0
    kept: int = 0
    redone: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, kept: int = 0, redone: int = 0) -> None:
        with self.lock:
            self.kept += kept
            self.redone += redone

    def add_written(self, bytes_read: int, bytes_written: int) -> None:
        with self.lock:
            self.written += 1
            self.bytes_read += bytes_read
            self.bytes_written += bytes_written


def convert_planned(
    source: Checkpoint,
    target: Path,
    conversion: Conversion,
    *,
    workers: int | None,
    allow_nonfinite: bool,
    progress: OnProgress | None,
) -> ConvertReport:
    """Do what was planned; see `lowprec.converters.api.convert`."""
    begin = time.monotonic()
    threads = count_workers(workers)
    require_apart(source.folder, target)
    fingerprint = source.fingerprint()
    staging = Staging(target, conversion, Identity.of(conversion, fingerprint))
    counts = _Counts()
    found = staging.survey()
    if found is not Survey.FINISHED:
        small = sum(record.size for record in fingerprint if record.name not in source.shards)
        staging.require_space(2 * small + _RECORD_BYTES * len(conversion.plan.steps))
        with staging.locked():
            found = staging.survey()  # another run may have ended since
            if found is not Survey.FINISHED:
                job = _Job(source, conversion, staging, allow_nonfinite=allow_nonfinite, progress=progress)
                job.run(threads)
                counts = job.counts
                staging.publish(job.files(fingerprint))
    if found is Survey.FINISHED:
        staging.finish(files_of(source, conversion, fingerprint))
    return ConvertReport(
        target=str(target),
        conversion=conversion,
        nothing_to_do=found is Survey.FINISHED,
        tensors_written=counts.written,
        tensors_kept=counts.kept,
        tensors_redone=counts.redone,
        bytes_read=counts.bytes_read,
        bytes_written=counts.bytes_written,
        seconds=time.monotonic() - begin,
    )


def require_apart(source: Path, target: Path) -> None:
    """Raises CheckpointError if source and target are one folder, or one lies in the other, through any links."""
    try:
        real_source, real_target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    except OSError as error:  # only a relative path asks where it is relative to
        raise CheckpointError(f"the current folder cannot be read: {error.strerror}; change into another") from None
    if real_source == real_target or _same(source, target):
        raise CheckpointError(f"source and target are the same folder '{real_source}'; give another target")
    if any(_same(path, source) for path in real_target.parents):
        raise CheckpointError(f"target '{target}' lies inside the source '{source}'; give a folder elsewhere")
    if any(_same(path, target) for path in real_source.parents):
        raise CheckpointError(f"source '{source}' lies inside the target '{target}'; give a folder elsewhere")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return False


class _Job:
    """One run under the lock."""

    def __init__(
        self,
        source: Checkpoint,
        conversion: Conversion,
        staging: Staging,
        *,
        allow_nonfinite: bool,
        progress: OnProgress | None,
    ) -> None:
        self._source = source
        self._conversion = conversion
        self._staging = staging
        self._computer = StripeComputer(source, conversion, allow_nonfinite=allow_nonfinite)
        self._meter = Meter(conversion.bytes_before, progress)
        self._journal: Journal = staging.prepare()
        self._flusher = Flusher()
        self._earlier = dict(self._journal.entries)
        self.counts = _Counts()

    def run(self, workers: int) -> None:
        """Finish every tensor. Raises what `convert` raises."""
        with self._flusher:
            run_tasks(make_tasks(self._conversion, self._source), self._do, workers)
        self._meter.report(Phase.PUBLISH, "", 0)

    def _do(self, task: Task) -> None:
        """One tensor, or one group of partners: only those that are not finished are written."""
        pending = [step for step in task.steps if not self._is_finished(step)]
        prepared = self._computer.prepare(task) if pending else Prepared()
        for step in pending:
            sources, outputs = self._computer.run(step, prepared, self._sink)
            self._journal.append(step.tensor.name, Entry(source=sources, outputs=outputs))
            written = sum(info.nbytes for info in self._conversion.outputs[step.tensor.name])
            self.counts.add_written(step.source.nbytes, written)
            self._meter.report(Phase.CONVERT, step.tensor.name, step.source.nbytes)

    def _sink(self, name: str) -> Sink:
        writer = self._staging.writer_of(name)

        def write(start: int, data: Bytes) -> None:
            writer.write(name, start, data)
            self._flusher.wrote(writer, data.nbytes)

        return write

    def _is_finished(self, step: Step) -> bool:
        """Whether an earlier run finished the step and its bytes are still there.

        Raises:
            CheckpointError: the source's bytes are no longer those that the earlier run read.
        """
        name = step.tensor.name
        entry = self._earlier.get(name)
        if entry is None:
            return False
        if self._computer.source_checksums(step) != entry.source:
            raise CheckpointError(
                f"tensor '{name}' of the source changed since '{self._staging.target}' was begun; delete the target"
            )
        for stored, digest in entry.outputs.items():
            if checksum_of(self._staging.writer_of(stored).chunks(stored)) != digest:
                self.counts.add(redone=1)
                return False
        self.counts.add(kept=1)
        self._meter.report(Phase.CHECK, name, step.source.nbytes)
        return True

    def files(self, fingerprint: tuple[FileRecord, ...]) -> dict[str, bytes]:
        """Every file but the shards in the order of publishing: the manifest last but one, config.json last."""
        files = files_of(self._source, self._conversion, fingerprint)
        config = files.pop(CONFIG)
        return {**files, MANIFEST_NAME: self._manifest(fingerprint).to_bytes(), CONFIG: config}

    def _manifest(self, fingerprint: tuple[FileRecord, ...]) -> Manifest:
        conversion = self._conversion
        shard_of = conversion.layout.weight_map()
        records = []
        for step in conversion.plan.steps:
            entry = self._journal.entries[step.tensor.name]
            outputs = tuple(
                Stored(info=info, shard=shard_of[info.name], xxh3_128=entry.outputs[info.name])
                for info in conversion.outputs[step.tensor.name]
            )
            records.append(TensorRecord(source=step.source, checksums=entry.source, outputs=outputs))
        return Manifest(
            contract=conversion.contract,
            digest=conversion.contract.digest,
            source_dialect=conversion.source_dialect,
            source=fingerprint,
            max_shard_size=conversion.max_shard_size,
            indexed=conversion.layout.indexed,
            loads=conversion.loads,
            unloadable=conversion.unloadable,
            carried=conversion.layout.carried,
            configs=tuple(
                FileRecord(name=name, size=len(data), xxh3_128=checksum(data))
                for name, data in sorted(config_files(conversion).items())
            ),
            tensors=tuple(records),
        )


def files_of(source: Checkpoint, conversion: Conversion, fingerprint: tuple[FileRecord, ...]) -> dict[str, bytes]:
    """Carried files, configs and index by name, with their content; everything but shards and manifest.

    Raises:
        CheckpointError: a carried file changed since the source was opened.
    """
    recorded = {record.name: record.xxh3_128 for record in fingerprint}
    files: dict[str, bytes] = {}
    for name in conversion.layout.carried:
        files[name] = read_bytes(source.folder / name)
        if checksum(files[name]) != recorded[name]:
            raise CheckpointError(f"'{source.folder / name}' changed while it was converted; run the command again")
    files.update(config_files(conversion))
    return files


def config_files(conversion: Conversion) -> dict[str, bytes]:
    """The JSON files that a result has: index, config.json and the dialect's own, as they are written."""
    contents: dict[str, Mapping[str, object]] = dict(conversion.configs)
    if conversion.layout.indexed:
        contents[INDEX] = conversion.layout.index()
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
