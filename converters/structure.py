"""The part of `verify` that reads no tensor: files, headers, index, config, engines against the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lowprec.checkpoint import (
    MANIFEST_NAME,
    Manifest,
    ShardReader,
    checksum,
    encode_header,
    parse_object,
    read_bytes,
    read_json,
)
from lowprec.contract import first_difference
from lowprec.errors import CheckpointError
from lowprec.plan import Action, TensorInfo

from .faults import FaultKind, Faults
from .hf import CONFIG, INDEX, list_folder, read_index, resolved
from .layout import Json, ShardLayout
from .report import Conversion
from .staging import PARTIAL


def check_structure(
    target: Path, manifest: Manifest, conversion: Conversion, faults: Faults
) -> Mapping[str, ShardReader]:
    """Compare a target's files with what its manifest promises.

    Returns:
        For each stored tensor that is there as it should be, the reader of its file.
    """
    names = list_folder(target)
    if PARTIAL in names:
        faults.add(FaultKind.FILE, PARTIAL, "the conversion is not finished; run it again")
    _check_records(manifest, conversion, faults)
    readers: dict[str, ShardReader] = {}
    for shard in conversion.layout.shards:
        readers.update(_check_shard(target, shard, faults))
    planned = {shard.name for shard in conversion.layout.shards}
    for name in sorted(names - planned):
        if name.endswith(".safetensors"):
            faults.add(FaultKind.FILE, name, "is not part of the result, but engines would load it")
    _check_index(target, names, manifest, conversion, faults)
    _check_configs(target, manifest, conversion, faults)
    _check_carried(target, manifest, faults)
    if manifest.loads != conversion.loads or manifest.unloadable != conversion.unloadable:
        faults.add(
            FaultKind.ENGINES,
            MANIFEST_NAME,
            f"records {list(manifest.loads)} as engines that load it, but these do: {list(conversion.loads)}",
        )
    return readers


def _check_records(manifest: Manifest, conversion: Conversion, faults: Faults) -> None:
    """The manifest's own table of tensors is the one that contract and dialect give."""
    shard_of = conversion.layout.weight_map()
    records = {record.source.name: record for record in manifest.tensors}
    for record in manifest.tensors:
        planned = {info.name: (info, shard_of[info.name]) for info in conversion.outputs[record.source.name]}
        recorded = {stored.info.name: (stored.info, stored.shard) for stored in record.outputs}
        for name in sorted({*planned, *recorded}):
            if planned.get(name) != recorded.get(name):
                what = f"records {_where(recorded.get(name))}, the contract gives {_where(planned.get(name))}"
                faults.add(FaultKind.MANIFEST, name, f"{MANIFEST_NAME} {what}")
    for step in conversion.plan.steps:
        record = records[step.tensor.name]
        if step.action is Action.KEEP and {*record.checksums.values()} != {s.xxh3_128 for s in record.outputs}:
            what = "is kept as it was, but its checksums before and after differ"
            faults.add(FaultKind.MANIFEST, step.tensor.name, f"{MANIFEST_NAME}: it {what}")


def _where(place: tuple[TensorInfo, str] | None) -> str:
    return "no such tensor" if place is None else f"{_describe(place[0])} in '{place[1]}'"


def _describe(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _check_shard(target: Path, shard: ShardLayout, faults: Faults) -> dict[str, ShardReader]:
    """One file's tensors; those that are as planned, with their reader."""
    try:
        reader = ShardReader(resolved(target, shard.name))
    except CheckpointError as error:
        faults.add(FaultKind.FILE, shard.name, str(error))
        return {}
    found = {name: placed.info for name, placed in reader.header.tensors.items()}
    planned = {info.name: info for info in shard.tensors}
    for name in sorted({*found, *planned}):
        if name not in found:
            faults.add(FaultKind.TENSOR, name, f"is missing from '{shard.name}'")
        elif name not in planned:
            faults.add(FaultKind.TENSOR, name, f"is in '{shard.name}', but does not belong there")
        elif found[name] != planned[name]:
            what = f"is {_describe(found[name])}, the contract gives {_describe(planned[name])}"
            faults.add(FaultKind.TENSOR, name, what)
    if found == planned and reader.header.digest != checksum(encode_header(shard.tensors)):
        faults.add(FaultKind.FILE, shard.name, "its tensors are right, but its header is not the one that we write")
    return {name: reader for name in found if found[name] == planned.get(name)}


def _check_index(
    target: Path, names: frozenset[str], manifest: Manifest, conversion: Conversion, faults: Faults
) -> None:
    layout = conversion.layout
    if not layout.indexed:
        if INDEX in names:
            faults.add(FaultKind.INDEX, INDEX, "is there, but the result is one file without an index")
        return
    try:
        weight_map, total_size = read_index(target / INDEX)
        data = read_bytes(target / INDEX)
    except CheckpointError as error:
        faults.add(FaultKind.INDEX, INDEX, str(error))
        return
    if total_size != layout.total_size:
        faults.add(FaultKind.INDEX, INDEX, f"total_size is {total_size}, the tensors have {layout.total_size} bytes")
    planned = layout.weight_map()
    if weight_map == planned and total_size == layout.total_size:
        _check_written(INDEX, FaultKind.INDEX, data, manifest, faults)
    for name in sorted({*weight_map, *planned}):
        if weight_map.get(name) != planned.get(name):
            what = f"is in {weight_map.get(name)!r} by the index, in {planned.get(name)!r} by the contract"
            faults.add(FaultKind.INDEX, name, what)


def _check_configs(target: Path, manifest: Manifest, conversion: Conversion, faults: Faults) -> None:
    """What the contract decides in each config, and that nothing else in it changed since it was written."""
    for name, planned in conversion.configs.items():
        try:
            data = read_bytes(resolved(target, name))
            found = parse_object(data, f"'{target / name}'", unique=False)
        except CheckpointError as error:
            faults.add(FaultKind.CONFIG, name, str(error))
            continue
        difference = first_difference(found, planned, name)
        if difference:
            faults.add(FaultKind.CONFIG, name, f"is not what the contract gives: {difference}")
        else:
            _check_written(name, FaultKind.CONFIG, data, manifest, faults)


def _check_written(name: str, kind: FaultKind, data: bytes, manifest: Manifest, faults: Faults) -> None:
    """The bytes of a file that the contract does not decide alone are those that were written."""
    if checksum(data) not in {record.xxh3_128 for record in manifest.configs if record.name == name}:
        faults.add(kind, name, "was changed after it was written: its checksum is another")


def _check_carried(target: Path, manifest: Manifest, faults: Faults) -> None:
    recorded = {record.name: record for record in manifest.source}
    for name in manifest.carried:
        record = recorded.get(name)
        if record is None:
            faults.add(FaultKind.MANIFEST, MANIFEST_NAME, f"carries '{name}' over, which its source does not have")
            continue
        try:
            data = read_bytes(resolved(target, name))
        except CheckpointError as error:
            faults.add(FaultKind.FILE, name, str(error))
            continue
        if checksum(data) != record.xxh3_128:
            faults.add(FaultKind.FILE, name, "is not the source's file")


def check_headers(target: Path, faults: Faults) -> None:
    """Where nothing says what a target must hold: whether its files can be read at all."""
    for name in sorted(name for name in list_folder(target) if name.endswith(".safetensors")):
        try:
            ShardReader(resolved(target, name))
        except CheckpointError as error:
            faults.add(FaultKind.FILE, name, str(error))


def read_target_config(target: Path, faults: Faults) -> Json | None:
    """The target's config.json, or None with a fault."""
    try:
        return read_json(resolved(target, CONFIG), unique=False)
    except CheckpointError as error:
        faults.add(FaultKind.CONFIG, CONFIG, str(error))
        return None
