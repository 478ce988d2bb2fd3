"""A Hugging Face checkpoint folder: opened strictly, headers only, and read tensor by tensor.

Which files are carried into a result is decided by this rule, and by nothing else: a regular file of the folder itself
(and the `.jinja` files of `additional_chat_templates/`) whose suffix is one of CARRIED_SUFFIXES or that has none
(LICENSE), unless its name begins with a dot or is one of REWRITTEN. Everything else is left out and named in the plan.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lowprec.checkpoint import (
    MANIFEST_NAME,
    FileRecord,
    ShardReader,
    checksum,
    read_bytes,
    read_json,
)
from lowprec.checkpoint.files import Bytes, cannot_read
from lowprec.errors import CheckpointError
from lowprec.formats.base import Array
from lowprec.plan import TensorInfo

from .layout import LeftOut

Json = dict[str, Any]

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"

_DEEPEST = 50
CARRIED_SUFFIXES = frozenset({"", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md"})
REWRITTEN: Mapping[str, str] = MappingProxyType(
    {
        CONFIG: "written anew",
        QUANT_CONFIG: "quantization metadata of the source",
        "quantization_config.json": "quantization metadata of the source",
        "quantize_config.json": "quantization metadata of the source",
        "quant_config.json": "quantization metadata of the source",
        MANIFEST_NAME: "manifest of the source",
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened checkpoint.

    config: config.json, with hf_quant_config.json under the key "hf_quant_config" if there is one. shards: file name
    -> reader. shard_of: stored tensor -> file name. total_size: what the index claims; None without one.
    """

    folder: Path
    config: Json
    shards: Mapping[str, ShardReader]
    shard_of: Mapping[str, str]
    indexed: bool
    total_size: int | None
    carried: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    def infos(self) -> dict[str, TensorInfo]:
        """Every stored tensor by name."""
        return {name: placed.info for reader in self.shards.values() for name, placed in reader.header.tensors.items()}

    def offset(self, name: str) -> tuple[str, int]:
        """File and offset of a stored tensor: sorting by it gives the order of the disk."""
        shard = self.shard_of[name]
        return shard, self.shards[shard].header.tensors[name].offset

    def read(self, name: str) -> Array:
        """One stored tensor. Raises CheckpointError."""
        return self.shards[self.shard_of[name]].read(name)

    def chunks(self, name: str, buffer: Bytes | None = None) -> Iterator[Bytes]:
        """One stored tensor's bytes, a piece at a time, all in `buffer` if there is one. Raises CheckpointError."""
        return self.shards[self.shard_of[name]].chunks(name, buffer)

    def read_into(self, name: str, start: int, data: Bytes) -> None:
        """Fill `data` with one stored tensor's bytes from `start` on. Raises CheckpointError."""
        self.shards[self.shard_of[name]].read_into(name, start, data)

    def fingerprint(self) -> tuple[FileRecord, ...]:
        """What the result is made from: shards by size and header, every other file that is read by its content."""
        records = [
            FileRecord(name=name, size=reader.header.size, xxh3_128=reader.header.digest)
            for name, reader in self.shards.items()
        ]
        others = [CONFIG, *self.carried, *([QUANT_CONFIG] if "hf_quant_config" in self.config else [])]
        for name in others:
            data = read_bytes(self.folder / name)
            records.append(FileRecord(name=name, size=len(data), xxh3_128=checksum(data)))
        return tuple(sorted(records, key=lambda record: record.name))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder and check that its index, files and headers agree.

    Raises:
        CheckpointError: anything missing, unreadable, inconsistent or outside the folder, naming the entry.
    """
    folder = Path(path)
    names = list_folder(folder)
    if CONFIG not in names:
        raise CheckpointError(f"'{folder}' has no {CONFIG}; give the folder of a Hugging Face checkpoint")
    config = read_config(folder, names)
    if INDEX in names:
        weight_map, total_size = read_index(folder / INDEX)
        if SINGLE in names and SINGLE not in weight_map.values():
            raise CheckpointError(f"'{folder}' has both {SINGLE} and {INDEX}; remove the one that is not the model")
        shards = {name: _open_shard(folder, name, names) for name in sorted(set(weight_map.values()))}
        check_index(weight_map, shards)
    elif SINGLE in names:
        total_size = None
        shards = {SINGLE: _open_shard(folder, SINGLE, names)}
        weight_map = dict.fromkeys(shards[SINGLE].header.tensors, SINGLE)
    else:
        raise CheckpointError(f"'{folder}' has neither {SINGLE} nor {INDEX}; only safetensors checkpoints can be read")
    carried, left_out = _sort_files(folder, names, set(shards))
    return Checkpoint(
        folder=folder,
        config=config,
        shards=shards,
        shard_of=weight_map,
        indexed=INDEX in names,
        total_size=total_size,
        carried=carried,
        left_out=left_out,
    )


def list_folder(folder: Path) -> frozenset[str]:
    """Names in a folder. Raises CheckpointError if it is not there, no folder, or unreadable."""
    try:
        return frozenset(os.listdir(folder))
    except NotADirectoryError:
        raise CheckpointError(f"'{folder}' is a file; give the folder of a Hugging Face checkpoint") from None
    except OSError as error:
        raise cannot_read(folder, error) from None


def read_config(folder: Path, names: frozenset[str]) -> Json:
    """config.json, with hf_quant_config.json under "hf_quant_config" as dialects expect it. Raises CheckpointError."""
    config = read_json(resolved(folder, CONFIG), unique=False)
    config.pop("hf_quant_config", None)
    if QUANT_CONFIG in names:
        config["hf_quant_config"] = read_json(resolved(folder, QUANT_CONFIG), unique=False)
    _require_shallow(config, folder / CONFIG)
    return config


def _require_shallow(content: Json, path: Path) -> None:
    """Raises CheckpointError if functions that call themselves for each level could run out of stack."""
    level: list[Any] = [content]
    for _ in range(_DEEPEST):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise CheckpointError(f"'{path}' is nested too deeply: more than {_DEEPEST} levels")


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """Tensor -> file name, and the total size that the index claims.

    Raises:
        CheckpointError: not an index, a tensor named twice, or a name that is not that of a safetensors file of the
            folder itself.
    """
    index = read_json(resolved(path.parent, path.name))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"'{path}' has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.isprintable() or "/" in shard or shard in ("", ".", ".."):
            raise CheckpointError(f"'{path}' places tensor {name!r} in {shard!r}, which is not a file of the folder")
        if not shard.endswith(SUFFIX) or shard.startswith("."):
            raise CheckpointError(f"'{path}' places tensor {name!r} in {shard!r}, which is no {SUFFIX} file")
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total_size if type(total_size) is int else None


def check_index(weight_map: Mapping[str, str], shards: Mapping[str, ShardReader]) -> None:
    """Every tensor lies in exactly the file that the index names. Raises CheckpointError."""
    for name, shard in weight_map.items():
        if name not in shards[shard].header.tensors:
            raise CheckpointError(f"{INDEX} places tensor {name!r} in '{shard}', which does not hold it")
    for shard, reader in shards.items():
        for name in reader.header.tensors:
            named = weight_map.get(name)
            if named is None:
                raise CheckpointError(f"'{shard}' holds tensor '{name}', which {INDEX} does not name")
            if named != shard:
                raise CheckpointError(f"tensor '{name}' lies in both '{named}' and '{shard}'")


def resolved(folder: Path, name: str) -> Path:
    """The path of a file of the folder.

    A symbolic link may lead to another file of the folder, or from a snapshot of the Hugging Face cache to the blobs
    beside it, which is how that cache stores every file; anywhere else is refused.

    Raises:
        CheckpointError: a link that leads out of the folder, or nowhere.
    """
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = error.strerror if isinstance(error, OSError) else "it is a loop of links"
        raise CheckpointError(f"'{path}' cannot be read: {reason}") from None
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"'{path}' is a link that leads out of the folder, to '{real}'")
    return path


def _open_shard(folder: Path, name: str, names: frozenset[str]) -> ShardReader:
    if name not in names:
        raise CheckpointError(f"{INDEX} names '{name}', which is not in '{folder}'")
    return ShardReader(resolved(folder, name))


def _sort_files(folder: Path, names: frozenset[str], shards: set[str]) -> tuple[tuple[str, ...], tuple[LeftOut, ...]]:
    """The files that are carried over, and those that are not with the reason."""
    carried: list[str] = []
    left_out: list[LeftOut] = []
    candidates = sorted(names - shards - {INDEX, CONFIG})
    if TEMPLATES in names and (folder / TEMPLATES).is_dir():
        candidates.remove(TEMPLATES)
        candidates += [f"{TEMPLATES}/{name}" for name in sorted(list_folder(folder / TEMPLATES))]
    for name in candidates:
        reason = _why_left_out(folder, name)
        if reason:
            shown = name if name.isprintable() else name.encode("unicode_escape").decode()
            left_out.append(LeftOut(name=shown, reason=reason))
        else:
            resolved(folder, name)
            carried.append(name)
    return tuple(carried), tuple(left_out)


def _why_left_out(folder: Path, name: str) -> str:
    """Why a file is not carried over; "" if it is."""
    plain = name.rpartition("/")[2]
    suffix = Path(plain).suffix.lower()
    if plain in REWRITTEN:
        return REWRITTEN[plain]
    if plain.startswith("."):
        return "hidden"
    if not name.isprintable():
        return "its name is not printable"
    try:
        mode = (folder / name).stat().st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(mode):
        return "a folder" if stat.S_ISDIR(mode) else "not a regular file"
    if plain.endswith(".index.json"):
        return "index of other weight files"
    if name.startswith(f"{TEMPLATES}/"):
        return "" if suffix == ".jinja" else "not a chat template"
    return "" if suffix in CARRIED_SUFFIXES else f"{suffix} files are not carried over"
