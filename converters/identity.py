"""What a target is made from. Two runs into one target must agree in all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowprec.checkpoint import FORMAT_VERSION, FileRecord, Manifest
from lowprec.contract import first_difference
from lowprec.errors import CheckpointError, ContractError

from .report import Conversion


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Contract, source, options and format version of a target: together they decide every byte of it.

    layout: digest of the layout of files; None for a finished target, whose manifest states the layout itself.
    """

    contract: Mapping[str, Any]
    source: tuple[FileRecord, ...]
    max_shard_size: int | None
    layout: str | None
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, conversion: Conversion, source: Sequence[FileRecord]) -> Identity:
        """The identity of a conversion that is to be made."""
        return cls(
            contract=conversion.contract.to_json(),
            source=tuple(source),
            max_shard_size=conversion.max_shard_size,
            layout=conversion.layout.digest(),
        )

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Identity:
        """The identity of a finished target."""
        return cls(
            contract=manifest.contract.to_json(),
            source=manifest.source,
            max_shard_size=manifest.max_shard_size,
            layout=None,
            format_version=manifest.format_version,
        )

    def to_json(self) -> dict[str, Any]:
        """The content of .state.json."""
        return {
            "format_version": self.format_version,
            "contract": self.contract,
            "source": {record.name: {"size": record.size, "xxh3_128": record.xxh3_128} for record in self.source},
            "options": {"max_shard_size": self.max_shard_size},
            "layout": self.layout,
        }

    def require_same(self, recorded: Mapping[str, Any], target: Path) -> None:
        """Raises ContractError or CheckpointError naming the first thing in which a target's record differs."""
        ours = self.to_json()
        for key, what in (
            ("format_version", "by a lowprec of another format version"),
            ("contract", "under another contract"),
            ("source", "from another source"),
            ("options", "with other options"),
            ("layout", "with another layout of files"),
        ):
            theirs = recorded.get(key)
            if key == "layout" and theirs is None:
                continue
            difference = first_difference(ours[key], theirs, key)
            if difference:
                kind = ContractError if key == "contract" else CheckpointError
                raise kind(f"'{target}' was made {what}: {difference}; give another target, or delete this one")
