"""Number formats: one file = one format = its data (FORMAT) and its readable numpy reference."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ..errors import FormatError, did_you_mean
from .base import Format

BUILTIN = ("fp8_block", "mxfp8", "nvfp4", "mxfp4", "int4_group")


@cache
def get_format(name: str) -> Format:
    """The format called `name`, ours or one registered under the entry point group `lowprec.formats`."""
    if name in BUILTIN:
        found: Any = importlib.import_module(f".{name}", __package__).FORMAT
    else:
        plugins = {entry.name: entry for entry in entry_points(group="lowprec.formats")}
        if name not in plugins:
            raise FormatError(f"unknown format '{name}'{did_you_mean(name, [*BUILTIN, *plugins])}")
        found = plugins[name].load()
    if not isinstance(found, Format):
        raise FormatError(f"format '{name}' is a {type(found).__name__}, not a lowprec Format")
    return found
