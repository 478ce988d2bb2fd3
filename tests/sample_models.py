"""Models, sources, contracts and plans for tests, from the real headers in tests/data/megatron."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lowprec.contract import Contract, Model, resolve
from lowprec.converters.family import Family, find_family
from lowprec.plan import Plan, SourceTensor, TensorInfo, build_plan
from lowprec.recipe import load_recipe

DATA = Path(__file__).parent / "data" / "megatron"
KINDS = ("qwen3", "qwen3_moe", "deepseek_v3")  # all of three layers


def config(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / kind / "hf" / "config.json").read_text(encoding="utf-8"))
    return content


def family(kind: str) -> Family:
    return find_family(config(kind)["model_type"])


@cache
def sources(kind: str) -> tuple[SourceTensor, ...]:
    """The plain tensors of a checkpoint, from its header alone."""
    with (DATA / kind / "hf" / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return tuple(source(name, tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items())


def source(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> SourceTensor:
    """One plain tensor."""
    info = TensorInfo(name=name, dtype=dtype, shape=shape)
    return SourceTensor(name=name, dtype=dtype, shape=shape, parts={"weight": info})


@cache
def model(kind: str) -> Model:
    return family(kind).model(config(kind), [item.name for item in sources(kind)])


def contract(recipe: str, kind: str, overrides: Iterable[str] = ()) -> Contract:
    return resolve(load_recipe(recipe, tuple(overrides)), model(kind))


def plan(recipe: str, kind: str, overrides: Iterable[str] = ()) -> Plan:
    return build_plan(contract(recipe, kind, overrides), family(kind), sources(kind))
