"""The records that explain, convert, verify and inspect return: frozen, with `to_json()` for `--json`."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowprec.contract import Contract
from lowprec.plan import Action, Plan, TensorInfo

from .layout import Layout


def to_plain(value: Any) -> Any:
    """Records, mappings and tuples as plain JSON values. A number that JSON cannot hold becomes its name."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, enum.Enum) else value


class Phase(enum.StrEnum):
    """What a run is doing while it reports progress."""

    CHECK = "check"  # resume: reading back what an earlier run finished
    CONVERT = "convert"
    PUBLISH = "publish"  # every tensor is done; files move into place
    VERIFY = "verify"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One report of a running job: `done_bytes` of `total_bytes` source bytes, and the tensor just finished."""

    phase: Phase
    tensor: str
    done_bytes: int
    total_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class RoleSummary:
    """What happens to the tensors of one role. formats: name of the result's format or dtype -> tensors."""

    role: str
    tensors: int
    formats: Mapping[str, int]
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion before it runs: pure, made from headers alone.

    outputs: logical name -> the tensors that will be stored for it. configs: config.json and the dialect's further
    files, by name. ignore: names the config tells engines not to quantize. engines: engine -> why it cannot load the
    result (empty: it loads). loads: the engines that do. notes: what a user should know of them all the same.
    """

    source: str
    source_dialect: str
    dialect: str
    contract: Contract
    plan: Plan
    outputs: Mapping[str, tuple[TensorInfo, ...]]
    layout: Layout
    max_shard_size: int | None
    configs: Mapping[str, dict[str, Any]]
    ignore: tuple[str, ...]
    engines: Mapping[str, tuple[str, ...]]
    loads: tuple[str, ...]
    notes: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    roles: tuple[RoleSummary, ...]

    @property
    def unloadable(self) -> bool:
        """The recipe names engines and none of them can load the result: it was made with `force`."""
        return bool(self.engines) and not self.loads

    def to_json(self) -> dict[str, Any]:
        """Plain values: the whole plan, one entry a tensor."""
        return {
            "source": self.source,
            "source_dialect": self.source_dialect,
            "dialect": self.dialect,
            "digest": self.contract.digest,
            "contract": self.contract.to_json(),
            "engines": to_plain(self.engines),
            "loads": list(self.loads),
            "notes": list(self.notes),
            "unloadable": self.unloadable,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "roles": to_plain(self.roles),
            "ignore": list(self.ignore),
            "max_shard_size": self.max_shard_size,
            "files": to_plain(self.layout),
            "configs": to_plain(self.configs),
            "tensors": [
                {
                    "name": step.tensor.name,
                    "role": step.tensor.role,
                    "layer": step.tensor.layer,
                    "expert": step.tensor.expert,
                    "shape": list(step.source.shape),
                    "action": str(step.action),
                    "format": step.weight.to_json() if step.action is Action.QUANTIZE and step.weight else step.dtype,
                    "reason": step.reason,
                    "partners": list(step.partners),
                    "bytes_before": step.source.nbytes,
                    "bytes_after": sum(info.nbytes for info in self.outputs[step.tensor.name]),
                    "outputs": [
                        {"name": info.name, "dtype": info.dtype, "shape": list(info.shape)}
                        for info in self.outputs[step.tensor.name]
                    ],
                }
                for step in self.plan.steps
            ],
        }


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """A finished conversion.

    nothing_to_do: the target was complete already. tensors_kept: finished by an earlier, interrupted run and checked
    again. tensors_redone: finished by it, but damaged since, and done again. bytes_read, bytes_written: of the tensors
    that this run wrote.
    """

    target: str
    conversion: Conversion
    nothing_to_do: bool
    tensors_written: int
    tensors_kept: int
    tensors_redone: int
    bytes_read: int
    bytes_written: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values; of the plan only its summary, which `explain` prints whole."""
        plan = self.conversion.to_json()
        summary = {key: value for key, value in plan.items() if key not in ("tensors", "contract", "files", "configs")}
        return {**_fields(self), "conversion": summary}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong with a target. kind: a word of `FaultKind`; where: file or tensor; what: the finding."""

    kind: str
    where: str
    what: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class RoleError:
    """Quantization error of one role against the source, in float64.

    sqnr_db: 10 log10(sum x^2 / sum (x - d)^2) over all quantized elements of the role, x the source's value and d the
    decoded one; inf if they are equal. max_relative_error: the largest over the role's tensors of
    max|x - d| / max|x|, so an element that is rounded to zero does not count as an error of 100 %.
    """

    role: str
    tensors: int
    sqnr_db: float
    max_relative_error: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `verify`: every fault, and with a source the error of every role."""

    target: str
    against: str | None
    digest: str | None
    faults: tuple[Fault, ...]
    tensors: int
    bytes: int
    errors: tuple[RoleError, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """No fault was found."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**_fields(self), "ok": self.ok}


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """What a checkpoint is, from its headers. oddities: what a reader should know, one line each."""

    path: str
    dialect: str
    model_type: str
    family: str | None
    digest: str | None
    loads: tuple[str, ...]
    shards: int
    tensors: int
    bytes: int
    roles: tuple[RoleSummary, ...]
    oddities: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return _fields(self)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: to_plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
