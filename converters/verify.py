"""Prove a converted checkpoint: its structure, the checksum of each tensor, and against its source every byte."""

from __future__ import annotations

import time
from pathlib import Path

from lowprec.checkpoint import MANIFEST_NAME, Manifest, read_manifest
from lowprec.errors import LowprecError

from .executors import count_workers, run_tasks
from .faults import FaultKind, Faults
from .hf import Checkpoint, list_folder, open_checkpoint
from .meter import Meter, OnProgress
from .plans import plan_of_manifest
from .report import VerifyReport
from .structure import check_headers, check_structure, read_target_config
from .tensors import TensorChecks


def verify_target(
    target: Path, *, against: str | Path | None, workers: int | None, progress: OnProgress | None
) -> VerifyReport:
    """Do what `lowprec.converters.api.verify` says."""
    begin = time.monotonic()
    threads = count_workers(workers)
    list_folder(target)
    source = None if against is None else open_checkpoint(against)
    faults = Faults()
    checks = _check(target, source, faults, progress)
    if checks is not None:
        run_tasks(checks.tasks, checks.do, threads)
    return VerifyReport(
        target=str(target),
        against=None if source is None else str(source.folder),
        digest=None if checks is None else checks.conversion.contract.digest,
        faults=faults.sorted(),
        tensors=0 if checks is None else len(checks.conversion.plan.steps),
        bytes=0 if checks is None else checks.conversion.bytes_after,
        errors=() if checks is None else checks.errors(),
        seconds=time.monotonic() - begin,
    )


def _check(target: Path, source: Checkpoint | None, faults: Faults, progress: OnProgress | None) -> TensorChecks | None:
    """Check everything but the tensors; None if manifest or config do not even say what these must be."""
    config = read_target_config(target, faults)
    manifest = _read_manifest(target, faults)
    if config is None or manifest is None:
        check_headers(target, faults)
        return None
    if source is not None:
        _check_fingerprint(manifest, source, faults)
        config = source.config  # what the target's config must be follows from the source's
    try:
        conversion = plan_of_manifest(manifest, config, str(target))
    except LowprecError as error:
        faults.add(FaultKind.MANIFEST, MANIFEST_NAME, f"does not describe a conversion: {error}")
        check_headers(target, faults)
        return None
    readers = check_structure(target, manifest, conversion, faults)
    meter = Meter(conversion.bytes_after, progress)
    return TensorChecks(manifest, conversion, readers, source, faults, meter)


def _read_manifest(target: Path, faults: Faults) -> Manifest | None:
    try:
        manifest = read_manifest(target)
    except LowprecError as error:
        faults.add(FaultKind.MANIFEST, MANIFEST_NAME, str(error))
        return None
    if manifest.digest != manifest.contract.digest:
        what = f"records the digest {manifest.digest}, but its contract has {manifest.contract.digest}"
        faults.add(FaultKind.CONTRACT, MANIFEST_NAME, what)
    return manifest


def _check_fingerprint(manifest: Manifest, source: Checkpoint, faults: Faults) -> None:
    recorded = {record.name: record for record in manifest.source}
    found = {record.name: record for record in source.fingerprint()}
    for name in sorted({*recorded, *found}):
        if name not in found:
            faults.add(FaultKind.SOURCE, name, "is not in the source, but the target was made from it")
        elif name not in recorded:
            faults.add(FaultKind.SOURCE, name, "is in the source, but the target was made without it")
        elif found[name] != recorded[name]:
            faults.add(FaultKind.SOURCE, name, "is not the file that the target was made from")
