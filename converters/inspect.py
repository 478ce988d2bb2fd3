"""What a checkpoint is, from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lowprec.checkpoint import MANIFEST_NAME, Manifest, read_manifest
from lowprec.dialects import detect
from lowprec.errors import LowprecError
from lowprec.plan import SourceTensor

from .family import Family
from .hf import QUANT_CONFIG, Checkpoint, list_folder, open_checkpoint
from .plans import family_of
from .report import InspectReport, RoleSummary
from .staging import PARTIAL

_NO_ROLE = "unknown"


def inspect_checkpoint(path: Path) -> InspectReport:
    """Do what `lowprec.converters.api.inspect` says."""
    checkpoint = open_checkpoint(path)
    oddities: list[str] = []
    dialect = detect(checkpoint.config)
    tensors = dialect.logical(checkpoint.config, checkpoint.infos())
    family = _find_family(checkpoint, oddities)
    manifest = _find_manifest(checkpoint, oddities)
    oddities += _odd_files(checkpoint, sum(tensor.nbytes for tensor in tensors))
    roles = _summarize(tensors, family, oddities)
    return InspectReport(
        path=str(path),
        dialect=dialect.name,
        model_type=str(checkpoint.config.get("model_type")),
        family=None if family is None else family.name,
        digest=None if manifest is None else manifest.digest,
        loads=() if manifest is None else manifest.loads,
        shards=len(checkpoint.shards),
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        roles=roles,
        oddities=tuple(oddities),
    )


def _find_family(checkpoint: Checkpoint, oddities: list[str]) -> Family | None:
    try:
        return family_of(checkpoint.config, str(checkpoint.folder))
    except LowprecError as error:
        oddities.append(str(error))
        return None


def _find_manifest(checkpoint: Checkpoint, oddities: list[str]) -> Manifest | None:
    if MANIFEST_NAME not in list_folder(checkpoint.folder):
        return None
    try:
        manifest = read_manifest(checkpoint.folder)
    except LowprecError as error:
        oddities.append(str(error))
        return None
    if manifest.digest != manifest.contract.digest:
        oddities.append(f"{MANIFEST_NAME}: the digest is not that of its contract")
    if manifest.unloadable:
        oddities.append("no engine loads this: it was converted with --force")
    return manifest


def _odd_files(checkpoint: Checkpoint, total_size: int) -> list[str]:
    expected = (QUANT_CONFIG, MANIFEST_NAME, PARTIAL)
    others = (item for item in checkpoint.left_out if item.name not in expected)
    found = [f"'{item.name}' is not part of the checkpoint: {item.reason}" for item in others]
    if PARTIAL in list_folder(checkpoint.folder):
        found.append("an unfinished conversion lies in it")
    if checkpoint.total_size not in (None, total_size):
        found.append(f"the index claims {checkpoint.total_size} bytes, the tensors have {total_size}")
    return found


def _summarize(tensors: Sequence[SourceTensor], family: Family | None, oddities: list[str]) -> tuple[RoleSummary, ...]:
    groups: dict[str, list[SourceTensor]] = {}
    for tensor in tensors:
        groups.setdefault(_role(tensor.name, family, oddities), []).append(tensor)
    return tuple(
        RoleSummary(
            role=role,
            tensors=len(members),
            formats=dict(sorted(Counter(_format(tensor) for tensor in members).items())),
            bytes_before=sum(tensor.nbytes for tensor in members),
            bytes_after=sum(tensor.nbytes for tensor in members),
        )
        for role, members in sorted(groups.items())
    )


def _role(name: str, family: Family | None, oddities: list[str]) -> str:
    if family is None:
        return _NO_ROLE
    try:
        return family.locate(name).role
    except LowprecError as error:
        oddities.append(str(error))
        return _NO_ROLE


def _format(tensor: SourceTensor) -> str:
    return tensor.dtype if tensor.stored is None else tensor.stored.format
