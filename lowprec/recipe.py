"""Recipes: what a user wants, as a TOML file. Loading checks every key, role and value.

A recipe speaks roles and layer ranges, never tensor names (except exact globs, last). `lowprec.contract`
resolves it for one model.
"""

from __future__ import annotations

import copy
import enum
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import FormatError, RecipeError, did_you_mean
from .formats import get_format
from .formats.base import Options
from .roles import LINEAR_ROLES, ROLES

SCHEMA_VERSION = 1
DTYPES = ("bfloat16", "float16", "float32")
ENGINES = ("sglang", "vllm", "transformers")

_TOP_KEYS = (
    "schema_version",
    "name",
    "description",
    "extends",
    "dialect",
    "engines",
    "quantize_from",
    "dtype",
    "rules",
    "policy",
    "backward",
)
_RULE_KEYS = ("roles", "layers", "names", "weight", "activation")
_LAYER_KEYS = ("first", "last")
_LARGEST = 1_000_000  # bytes of a recipe file; a device such as /dev/zero never ends
_SHARE = re.compile(r"(100|[0-9]{1,2})%")

Count = int | str  # a number of layers, or a share such as "15%"


class Mtp(enum.StrEnum):
    """What happens to the linears of multi-token-prediction layers."""

    QUANTIZE = "quantize"
    KEEP = "keep"


class Backward(enum.StrEnum):
    """What the backward pass of training multiplies with (spec: TransformerEngine's NVTE_BACKWARD_OVERRIDE)."""

    HIGH_PRECISION = "high_precision"
    DEQUANTIZED = "dequantized"
    QUANTIZED = "quantized"


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which tensors a rule is about: all conditions that are given must hold; matching is full, never partial.

    roles: role names. layers: indices, or the `first` / `last` so many decoder layers. names: globs over whole
    HF weight names, `*` does not cross a dot.
    """

    roles: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    first: Count | None = None
    last: Count | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A selector and what to do with its weights: quantize (`weight` given) or keep (`weight` is None)."""

    selector: Selector
    weight: Options | None
    activation: Options | None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What stays in high precision before any rule is asked."""

    first: Count
    last: Count
    mtp: Mtp
    keep: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe file, checked.

    dialect: how the result is spelled on disk (`lowprec.dialects.get_dialect` refuses an unknown one). engines: who
    loads it, at least one. quantize_from: weights are rounded to this dtype before they are quantized. dtype: what
    dequantized weights are rounded to. rules: ordered, the first full match wins, no match = keep.
    """

    name: str
    description: str
    dialect: str
    engines: tuple[str, ...]
    quantize_from: str
    dtype: str
    rules: tuple[Rule, ...]
    policy: Policy
    backward: Backward


def list_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with lowprec."""
    folder = resources.files("lowprec.recipes")
    return tuple(sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".toml")))


def recipe_text(name: str) -> str:
    """The TOML text, with its comments, of a recipe that comes with lowprec. Raises RecipeError."""
    if name not in list_recipes():
        raise RecipeError(f"unknown recipe '{name}'{did_you_mean(name, list_recipes())}")
    return resources.files("lowprec.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by name, or from a TOML file.

    Args:
        name_or_path: a name of `list_recipes()`, or a path (a Path, or anything that ends in .toml or has a separator).
        overrides: `key.path=value` items, applied last; the value is TOML, or a bare word. `rules.0.weight.scale=pow2`
            reaches into a list by index.

    Raises:
        RecipeError: unknown name, unreadable file, unknown key, role or value; the message suggests the nearest.
    """
    name = str(name_or_path)
    tree = _read_tree(name, isinstance(name_or_path, Path) or _is_path(name), {})
    for item in overrides:
        _apply_override(tree, item)
    return _parse(tree, name)


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def _read_tree(name: str, is_path: bool, seen: Mapping[str, str]) -> dict[str, Any]:
    """The recipe's tables with its parents' merged in. seen: the children, by identity, as they were called."""
    identity = str(Path(name).resolve()) if is_path else name
    if identity in seen:
        raise RecipeError(f"recipe '{name}' extends itself: {' -> '.join([*seen.values(), name])}")
    tree = _parse_toml(name, is_path)
    if is_path and "name" not in tree:
        tree["name"] = Path(name).stem  # inherited, it would call two recipes the same
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise RecipeError(f"recipe '{name}': extends must be the name or path of a recipe")
    parent_is_path = _is_path(parent)
    if parent_is_path and is_path:
        parent = str(Path(name).parent / parent)
    return _merge(_read_tree(parent, parent_is_path, {**seen, identity: name}), tree)


def _parse_toml(name: str, is_path: bool) -> dict[str, Any]:
    """The text of a recipe as TOML gives it."""
    try:
        return tomllib.loads(_read_text(name) if is_path else recipe_text(name))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe '{name}' is not valid TOML: {error}") from None
    except RecursionError:
        raise RecipeError(f"recipe '{name}' is nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe file '{name}' cannot be read: {error}") from None


def _read_text(name: str) -> str:
    """The text of a file, which may be a pipe. Raises OSError, UnicodeDecodeError, RecipeError."""
    with open(name, "rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise RecipeError(f"'{name}' is no recipe: it has more than {_LARGEST} bytes")
    return data.decode("utf-8").replace("\r\n", "\n")


def _merge(base: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Key by key; tables merge, everything else (rules among them) is replaced as a whole."""
    merged = dict(base)
    for key, value in child.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _apply_override(tree: dict[str, Any], item: str) -> None:
    """Set one `key.path=value` in place."""
    path, equals, text = item.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"override '{item}' must look like policy.last=0")
    if keys[0] == "extends":
        raise RecipeError(f"override '{item}': a parent cannot be set; name it as the recipe, or write a recipe file")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value: Any = parsed.pop("value")
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except RecursionError:
        raise RecipeError(f"override '{path}': its value is nested too deeply") from None
    else:
        if parsed:
            raise RecipeError(f"override {item!r} sets more than '{path}'; repeat --set for each key")
    node: Any = tree
    for depth, key in enumerate(keys):
        here = ".".join(keys[: depth + 1])
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise RecipeError(f"override '{item}': {here} must be an index below {len(node)}")
            slot: Any = int(key)
        elif isinstance(node, dict):
            slot = key
            if not last and key not in node:
                raise RecipeError(f"override '{item}': no key '{here}'{did_you_mean(key, node)}")
        else:
            raise RecipeError(f"override '{item}': '{'.'.join(keys[:depth])}' has no keys below it")
        if last:
            node[slot] = value
        else:
            node = node[slot]


def _parse(tree: Mapping[str, Any], where: str) -> Recipe:
    """The checked record of a merged tree."""
    _check_keys(tree, _TOP_KEYS, where, required=[key for key in _TOP_KEYS if key not in ("extends", "dtype")])
    version = tree["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise RecipeError(
            f"recipe '{where}': schema_version {version!r} is not known; this lowprec reads {SCHEMA_VERSION}"
        )
    rules = tree["rules"]
    if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
        raise RecipeError(f"recipe '{where}': rules must be a list of tables")
    backward = _table(tree, "backward", where)
    _check_keys(backward, ("mode",), f"{where}: backward", required=["mode"])
    return Recipe(
        name=_string(tree, "name", where),
        description=_string(tree, "description", where),
        dialect=_string(tree, "dialect", where),
        engines=_engines(tree["engines"], f"{where}: engines"),
        quantize_from=_choice(tree["quantize_from"], DTYPES, f"{where}: quantize_from"),
        dtype=_choice(tree.get("dtype", "bfloat16"), DTYPES, f"{where}: dtype"),
        rules=tuple(_parse_rule(rule, f"{where}: rules.{index}") for index, rule in enumerate(rules)),
        policy=_parse_policy(_table(tree, "policy", where), f"{where}: policy"),
        backward=Backward(_choice(backward["mode"], [str(mode) for mode in Backward], f"{where}: backward.mode")),
    )


def _parse_rule(table: Mapping[str, Any], where: str) -> Rule:
    """One entry of `[[rules]]`."""
    _check_keys(table, _RULE_KEYS, where, required=["weight"])
    weight = _parse_format(table["weight"], f"{where}.weight")
    activation = _parse_format(table.get("activation", "keep"), f"{where}.activation")
    roles = _roles(table.get("roles", []), f"{where}.roles")
    names = _strings(table.get("names", []), f"{where}.names")
    if not roles and not names:
        raise RecipeError(f"recipe '{where}' selects nothing: give roles or names")
    if weight is not None:
        for role in roles:
            if role not in LINEAR_ROLES:
                raise RecipeError(
                    f"recipe '{where}': role '{role}' is never quantized{did_you_mean(role, LINEAR_ROLES)}"
                )
    elif activation is not None:
        raise RecipeError(f"recipe '{where}': activations cannot be quantized where the weight is kept")
    layers, first, last = _parse_layers(table.get("layers"), f"{where}.layers")
    selector = Selector(roles=roles, names=names, layers=layers, first=first, last=last)
    return Rule(selector=selector, weight=weight, activation=activation)


def _parse_layers(value: Any, where: str) -> tuple[tuple[int, ...] | None, Count | None, Count | None]:
    """`layers = [0, 1]` or `layers = { first = 2 }` or `{ last = "15%" }`."""
    if value is None:
        return None, None, None
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value) and value:
        return tuple(sorted(set(value))), None, None
    if isinstance(value, Mapping) and len(value) == 1:
        _check_keys(value, _LAYER_KEYS, where)
        ((key, count),) = value.items()
        checked = _count(count, f"{where}.{key}")
        return None, checked if key == "first" else None, checked if key == "last" else None
    raise RecipeError(f"recipe '{where}' must be a list of layer indices, {{ first = 2 }} or {{ last = \"15%\" }}")


def _parse_policy(table: Mapping[str, Any], where: str) -> Policy:
    """`[policy]`; every key must be stated, since a default would be a second place that decides."""
    keys = ("first", "last", "mtp", "keep")
    _check_keys(table, keys, where, required=keys)
    return Policy(
        first=_count(table["first"], f"{where}.first"),
        last=_count(table["last"], f"{where}.last"),
        mtp=Mtp(_choice(table["mtp"], [str(mode) for mode in Mtp], f"{where}.mtp")),
        keep=_roles(table["keep"], f"{where}.keep"),
    )


def _parse_format(value: Any, where: str) -> Options | None:
    """A `{ format = ..., option = ... }` table with every option stated, or "keep"."""
    if value == "keep":
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("format"), str):
        raise RecipeError(f"recipe '{where}' must be \"keep\" or a table with a format")
    values = {key: item for key, item in value.items() if key != "format"}
    try:
        options: Options = get_format(value["format"]).options.parse(values)
    except FormatError as error:
        raise RecipeError(f"recipe '{where}': {error}") from None
    missing = [key for key in options.to_json() if key != "format" and key not in values]
    if missing:
        raise RecipeError(
            f"recipe '{where}' must state every option of {value['format']}; missing: {', '.join(missing)}"
        )
    return options


def _count(value: Any, where: str) -> Count:
    """A number of layers or a percentage as text."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and _SHARE.fullmatch(value):
        return value
    raise RecipeError(f"recipe '{where}' = {value!r} must be a number of layers such as 2 or a share such as \"15%\"")


def _engines(value: Any, where: str) -> tuple[str, ...]:
    """A list of known engines; an empty one would promise nothing and check nothing."""
    engines = _strings(value, where)
    for engine in engines:
        if engine not in ENGINES:
            raise RecipeError(f"recipe '{where}': unknown engine '{engine}'{did_you_mean(engine, ENGINES)}")
    if not engines:
        raise RecipeError(f"recipe '{where}' must name an engine (known: {', '.join(ENGINES)})")
    return engines


def _roles(value: Any, where: str) -> tuple[str, ...]:
    """A list of known roles."""
    roles = _strings(value, where)
    for role in roles:
        if role not in ROLES:
            raise RecipeError(f"recipe '{where}': unknown role '{role}'{did_you_mean(role, ROLES)}")
    return roles


def _strings(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings without repetition."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecipeError(f"recipe '{where}' must be a list of strings")
    if len(set(value)) != len(value):
        raise RecipeError(f"recipe '{where}' names something twice")
    return tuple(value)


def _string(tree: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(tree[key], str):
        raise RecipeError(f"recipe '{where}': {key} must be a string")
    return str(tree[key])


def _table(tree: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    if not isinstance(tree[key], Mapping):
        raise RecipeError(f"recipe '{where}': {key} must be a table")
    return tree[key]  # type: ignore[no-any-return]


def _choice(value: Any, choices: Sequence[str], where: str) -> str:
    if value not in choices:
        raise RecipeError(f"recipe '{where}' = {value!r} is not known{did_you_mean(str(value), choices)}")
    return str(value)


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str, required: Sequence[str] = ()) -> None:
    """Refuse unknown keys and name missing ones."""
    for key in table:
        if key not in known:
            raise RecipeError(f"recipe '{where}': unknown key '{key}'{did_you_mean(key, known)}")
    for key in required:
        if key not in table:
            raise RecipeError(f"recipe '{where}': key '{key}' is missing")
