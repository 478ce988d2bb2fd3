"""The manifest `lowprec.json`: what a converted checkpoint was made from and what it must hold.

Deterministic: the same source, contract and options give the same bytes. It names no time, host, path or backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..contract import Contract, canonical, first_difference
from ..errors import CheckpointError, LowprecError
from ..formats import get_format
from ..formats.base import Options
from ..plan import SourceTensor, TensorInfo
from .files import checksum, parse_object, read_bytes

MANIFEST_NAME = "lowprec.json"
SCHEMA_VERSION = 1
# Counts up whenever the same source and contract give other bytes than before: then nothing older is continued.
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file: its size and the checksum of its header (safetensors files) or of all its bytes."""

    name: str
    size: int
    xxh3_128: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.name, "size": self.size, "xxh3_128": self.xxh3_128}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of the result: what it is, the file it lies in, and the checksum of its bytes."""

    info: TensorInfo
    shard: str
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One logical tensor: the source's pieces with the checksum of each, by the dialect's words, and the result."""

    source: SourceTensor
    checksums: Mapping[str, str]
    outputs: tuple[Stored, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything `verify` needs to rebuild the plan without the source.

    digest: the contract's, as recorded; `verify` computes it again. loads: the engines that load the result.
    unloadable: the recipe names engines and none of them does ("no engine loads this"). configs: config.json, the
    index and the dialect's own file, as they were written.
    """

    contract: Contract
    digest: str
    source_dialect: str
    source: tuple[FileRecord, ...]
    max_shard_size: int | None
    indexed: bool
    loads: tuple[str, ...]
    unloadable: bool
    carried: tuple[str, ...]
    configs: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    lowprec_version: str = __version__
    format_version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file's bytes: JSON with sorted keys, a line a key and a tensor; the last is the others' checksum."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "format_version": self.format_version,
            "lowprec_version": self.lowprec_version,
            "contract": self.contract.to_json(),
            "digest": self.digest,
            "source": {"dialect": self.source_dialect, "files": [record.to_json() for record in self.source]},
            "options": {"max_shard_size": self.max_shard_size},
            "indexed": self.indexed,
            "loads": list(self.loads),
            "unloadable": self.unloadable,
            "carried": list(self.carried),
            "configs": [record.to_json() for record in self.configs],
        }
        tensors = {record.source.name: _tensor_to_json(record) for record in self.tensors}
        lines = [f"{canonical(key)}:{canonical(value)}" for key, value in sorted(head.items())]
        rows = [f"{canonical(name)}:{canonical(value)}" for name, value in sorted(tensors.items())]
        lines.append('"tensors":{' + ",\n".join(rows) + "}")
        body = ",\n".join(lines)
        return f'{{\n{body},\n"xxh3_128":"{checksum(body.encode())}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Inverse of `to_bytes`. Raises CheckpointError if the text is not exactly a manifest of this lowprec."""
        content = parse_object(data, where)
        for key, known in (("schema_version", SCHEMA_VERSION), ("format_version", FORMAT_VERSION)):
            if content.get(key) != known:
                raise CheckpointError(f"{where}: {key} is {content.get(key)!r}, this lowprec reads {known}")
        try:
            manifest = _from_json(content)
            difference = first_difference(parse_object(manifest.to_bytes(), where), content, "manifest")
        except (LowprecError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from None
        if difference:
            raise CheckpointError(f"{where} cannot be read: {difference}")
        if manifest.to_bytes() != data:
            raise CheckpointError(f"{where} was changed: it says what lowprec writes, but not as lowprec writes it")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a converted checkpoint. Raises CheckpointError."""
    path = folder / MANIFEST_NAME
    return Manifest.from_bytes(read_bytes(path), f"'{path}'")


def _tensor_to_json(record: TensorRecord) -> dict[str, Any]:
    source = record.source
    return {
        "dtype": source.dtype,
        "shape": list(source.shape),
        "stored": None if source.stored is None else source.stored.to_json(),
        "parts": {
            word: {**_info_to_json(info), "xxh3_128": record.checksums[word]} for word, info in source.parts.items()
        },
        "outputs": [
            {**_info_to_json(stored.info), "shard": stored.shard, "xxh3_128": stored.xxh3_128}
            for stored in record.outputs
        ],
    }


def _info_to_json(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape)}


def _from_json(content: Mapping[str, Any]) -> Manifest:
    """Build the record; anything that is not of the right kind raises some exception of Python's."""
    return Manifest(
        contract=Contract.from_json(content["contract"]),
        digest=str(content["digest"]),
        source_dialect=str(content["source"]["dialect"]),
        source=tuple(FileRecord(**record) for record in content["source"]["files"]),
        max_shard_size=content["options"]["max_shard_size"],
        indexed=content["indexed"],
        loads=tuple(content["loads"]),
        unloadable=content["unloadable"],
        carried=tuple(_file_name(name) for name in content["carried"]),
        configs=tuple(FileRecord(**record) for record in content["configs"]),
        tensors=tuple(_tensor_from_json(name, entry) for name, entry in sorted(content["tensors"].items())),
        lowprec_version=str(content["lowprec_version"]),
        format_version=content["format_version"],
    )


def _tensor_from_json(name: str, entry: Mapping[str, Any]) -> TensorRecord:
    source = SourceTensor(
        name=name,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        stored=_options_from_json(entry["stored"]),
        parts={word: _info_from_json(part) for word, part in entry["parts"].items()},
    )
    if source.stored is None and set(source.parts) != {"weight"}:
        raise ValueError(f"tensor '{name}' is not quantized, but consists of {sorted(source.parts)}")
    return TensorRecord(
        source=source,
        checksums={word: str(part["xxh3_128"]) for word, part in entry["parts"].items()},
        outputs=tuple(
            Stored(info=_info_from_json(part), shard=_file_name(part["shard"]), xxh3_128=str(part["xxh3_128"]))
            for part in entry["outputs"]
        ),
    )


def _file_name(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not a file of the folder")
    return name


def _info_from_json(part: Mapping[str, Any]) -> TensorInfo:
    info = TensorInfo(name=str(part["name"]), dtype=str(part["dtype"]), shape=tuple(part["shape"]))
    if info.nbytes < 0:  # also raises for an unknown dtype and sizes that are not numbers
        raise ValueError(f"tensor '{info.name}' has a negative size")
    return info


def _options_from_json(content: Mapping[str, Any] | None) -> Options | None:
    if content is None:
        return None
    options: Options = get_format(content["format"]).options.parse(
        {key: value for key, value in content.items() if key != "format"}
    )
    return options
