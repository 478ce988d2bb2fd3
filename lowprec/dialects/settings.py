"""Reading a source's quantization settings: every wrong type or missing key is one CheckpointError.

A config comes from outside, so nothing about it is taken for granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

_SECTIONS = (("quantization_config",), ("compression_config",), ("text_config", "quantization_config"))
_HF_QUANT_CONFIG = "hf_quant_config"


def quantization_section(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization settings of a source, flat; None if it has none.

    config.json is asked first, in the order in which SGLang looks (`quantization_config`, `compression_config`,
    `text_config.quantization_config`), then hf_quant_config.json, whose nested form is flattened: `exclude_modules`
    becomes `ignore`.

    Raises:
        CheckpointError: a section that is not a table.
    """
    for path in _SECTIONS:
        node: Any = config
        for key in path:
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is not None:
            return _flatten(_mapping(node, ".".join(path)), ".".join(path))
    if config.get(_HF_QUANT_CONFIG) is not None:
        return _flatten(_mapping(config[_HF_QUANT_CONFIG], "hf_quant_config.json"), "hf_quant_config.json")
    return None


def _flatten(section: dict[str, Any], where: str) -> dict[str, Any]:
    """ModelOpt's nested form `{"producer": .., "quantization": {..}}` as its flat one."""
    if "quantization" not in section:
        return section
    inner = _mapping(section["quantization"], f"{where}.quantization")
    if "exclude_modules" in inner:
        inner["ignore"] = inner.pop("exclude_modules")
    return {"quant_method": "modelopt", **inner}


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config: {where} must be a table, not {_show(value)}")
    return dict(value)


def require(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> Any:
    """The value of a key that must be there and be one of `allowed` (True is not 1, 4.0 is not 4)."""
    if key not in section:
        raise CheckpointError(f"config: {where}.{key} is missing; it must be {_choices(allowed)}")
    return optional(section, key, allowed, where)


def optional(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> Any:
    """The value of a key that must be one of `allowed` if it is there; None if it is not."""
    value = section.get(key)
    if key in section and not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise CheckpointError(f"config: {where}.{key} is {_show(value)}; only {_choices(allowed)} can be read")
    return value


def table(section: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """The table under a key that must be there."""
    if key not in section:
        raise CheckpointError(f"config: {where}.{key} is missing")
    return _mapping(section[key], f"{where}.{key}")


def positive_ints(section: Mapping[str, Any], key: str, count: int, where: str) -> tuple[int, ...]:
    """A list of `count` positive integers under a key that must be there."""
    value = section.get(key)
    good = isinstance(value, list) and len(value) == count and all(type(item) is int and item > 0 for item in value)
    if not good:
        raise CheckpointError(f"config: {where}.{key} is {_show(value)}; it must be {count} positive integers")
    assert isinstance(value, list)
    return tuple(value)


def positive_int(section: Mapping[str, Any], key: str, where: str) -> int:
    """A positive integer under a key that must be there."""
    value = section.get(key)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"config: {where}.{key} is {_show(value)}; it must be a positive integer")
    return value


def names(section: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of strings under a key that may be missing or null."""
    value = section.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"config: {where}.{key} is {_show(value)}; it must be a list of strings")
    return tuple(value)


def _choices(allowed: tuple[Any, ...]) -> str:
    return " or ".join(_show(choice) for choice in allowed)


def _show(value: Any) -> str:
    """A value in a message, cut short: a config may hold anything."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
