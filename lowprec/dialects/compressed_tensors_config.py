"""The `quantization_config` of compressed-tensors: one config group, written and read.

Fields and their values are those of compressed-tensors (quantization/quant_args.py, quant_scheme.py); engines
validate what they read with the same classes, which refuse unknown keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from ..errors import CheckpointError, PlanError
from ..formats.base import Options
from ..formats.fp8_block import Fp8BlockOptions
from ..formats.int4_group import Int4GroupOptions
from ..formats.mxfp4 import Mxfp4Options
from ..formats.mxfp8 import Mxfp8Options
from .base import Json
from .settings import names, optional, positive_int, require, table

_WHERE = "quantization_config"
_MXFP4, _INT4 = "mxfp4-pack-quantized", "pack-quantized"
_MX_GROUP = 32
_U8 = "torch.uint8"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What the config says: storage format, the weights' group, and `input_activations` (None: not quantized)."""

    format: str
    group_size: int
    activations: Json | None = None

    @classmethod
    def of(cls, weight: Options, activations: Collection[Options | None]) -> Self:
        """The scheme of a plan. Raises PlanError for formats it cannot state, or for several activation formats."""
        if len(activations) != 1:
            raise PlanError("a compressed_tensors checkpoint states one activation format; the rules give several")
        (activation,) = activations
        stated = _activation_args(activation)
        if isinstance(weight, Mxfp4Options):
            return cls(format=_MXFP4, group_size=_MX_GROUP, activations=stated)
        if isinstance(weight, Int4GroupOptions):
            if stated is not None:
                raise PlanError(f"int4_group weights go with unquantized activations, not with {activation}")
            return cls(format=_INT4, group_size=weight.group)
        raise PlanError(f"a compressed_tensors checkpoint of ours cannot state {weight.format} weights")


def _activation_args(options: Options | None) -> Json | None:
    """`input_activations` for a format; scales are computed at run time."""
    base = {"type": "float", "symmetric": True, "strategy": "group", "dynamic": True}
    match options:
        case None:
            return None
        case Mxfp8Options():
            return {"num_bits": 8, **base, "group_size": _MX_GROUP, "scale_dtype": _U8}
        case Mxfp4Options():
            return {"num_bits": 4, **base, "group_size": _MX_GROUP, "scale_dtype": _U8}
        case Fp8BlockOptions(block=(1, columns)):
            return {"num_bits": 8, **base, "group_size": columns}
        case _:
            raise PlanError(f"a compressed_tensors checkpoint cannot state activations in {options.to_json()}")


def write_config(scheme: Scheme, ignore: tuple[str, ...]) -> Json:
    """The section for config.json. No KV-cache scheme: no scales for it are written."""
    weights: Json = {
        "num_bits": 4,
        "type": "float" if scheme.format == _MXFP4 else "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    if scheme.format == _MXFP4:
        weights["scale_dtype"] = _U8
    group: Json = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": scheme.activations,
        "output_activations": None,
        "format": scheme.format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def read_scheme(section: Json) -> Scheme:
    """What a source's section says. Raises CheckpointError for anything that our formats do not hold."""
    groups = table(section, "config_groups", _WHERE)
    if len(groups) != 1:
        raise CheckpointError(
            f"config: {_WHERE}.config_groups has {len(groups)} groups; checkpoints with one can be read"
        )
    optional(section, "quantization_status", ("compressed",), _WHERE)
    optional(section, "kv_cache_scheme", (None,), _WHERE)
    names(section, "ignore", _WHERE)
    where = f"{_WHERE}.config_groups.{next(iter(groups))}"
    group = table(groups, next(iter(groups)), f"{_WHERE}.config_groups")
    stated = group if group.get("format") is not None else section
    format_name = require(stated, "format", (_MXFP4, _INT4), where if stated is group else _WHERE)
    weights = table(group, "weights", where)
    where += ".weights"
    expected: dict[str, Any] = {"num_bits": 4, "type": "float" if format_name == _MXFP4 else "int", "strategy": "group"}
    for key, value in expected.items():
        require(weights, key, (value,), where)
    optional(weights, "symmetric", (True,), where)
    optional(weights, "dynamic", (False,), where)
    group_size = positive_int(weights, "group_size", where)
    if format_name == _MXFP4 and group_size != _MX_GROUP:
        require(weights, "group_size", (_MX_GROUP,), where)
    return Scheme(format=format_name, group_size=group_size)
