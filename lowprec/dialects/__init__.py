"""Dialects: one file = how one kind of serving checkpoint spells quantized tensors and says so in its config."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ..errors import CheckpointError, PlanError, did_you_mean
from .base import Dialect, Json
from .settings import quantization_section

# In the order in which `detect` asks them: the more particular of two that share a quant_method comes first.
BUILTIN = ("bf16", "deepseek_fp8", "vllm_mxfp8", "sglang_mxfp8", "modelopt_nvfp4", "compressed_tensors")


@cache
def get_dialect(name: str) -> Dialect:
    """The dialect called `name`, ours or one registered under the entry point group `lowprec.dialects`.

    Raises:
        PlanError: no such dialect, or an entry point that does not lead to one.
    """
    if name in BUILTIN:
        found: Any = importlib.import_module(f".{name}", __package__).DIALECT
    else:
        plugins = {entry.name: entry for entry in entry_points(group="lowprec.dialects")}
        if name not in plugins:
            raise PlanError(f"unknown dialect '{name}'{did_you_mean(name, [*BUILTIN, *plugins])}")
        found = plugins[name].load()
    if not isinstance(found, Dialect):
        raise PlanError(f"dialect '{name}' is a {type(found).__name__}, not an instance of a lowprec Dialect")
    return found


def list_dialects() -> tuple[str, ...]:
    """Names of all dialects, ours first."""
    plugins = (entry.name for entry in entry_points(group="lowprec.dialects"))
    return (*BUILTIN, *sorted(name for name in plugins if name not in BUILTIN))


def detect(config: Json) -> Dialect:
    """The dialect of a source, from its config.json (hf_quant_config.json under the key "hf_quant_config").

    A source without any quantization section is `bf16`.

    Raises:
        CheckpointError: a section that no dialect recognizes; the message says what is known.
    """
    known: set[str] = set()
    for name in list_dialects():  # one at a time: other packages' dialects are loaded only if none of ours fits
        dialect = get_dialect(name)
        if dialect.recognizes(config):
            return dialect
        known.update(dialect.quant_methods)
    section = quantization_section(config) or {}
    said = {key: section[key] for key in ("quant_method", "quant_algo") if key in section}
    raise CheckpointError(f"config.json: quantization {said} is not known; known are {', '.join(sorted(known))}")
