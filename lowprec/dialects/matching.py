"""How serving engines match a module's path against an ignore list: one small function a rule.

Facts from sglang 0.5.23 (srt/layers/quantization: utils.py, modelopt_quant.py, compressed_tensors/utils.py), vllm
0.33.0 (model_executor/layers/quantization: utils/quant_utils.py, modelopt.py, utils/config_utils.py) and transformers
5.24 (quantizers/quantizers_utils.py). The table of which engine uses which rule is in `engines.py`.

A rule is a function of (ignore list, path of an engine's module, packed). It says whether the engine leaves the
module unquantized, and raises EngineRefusesError where the engine would stop. `packed` is what the engine's model
class calls packed_modules_mapping: last word of a fused module -> last words of its shards in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property

Packed = Mapping[str, tuple[str, ...]]
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_LITERAL = re.compile(r"[\w.\-]*")


class EngineRefusesError(Exception):
    """The engine raises while it builds the model."""


class IgnoreList:
    """The entries of one ignore list, indexed so that a model of many thousand modules is matched quickly."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self.names = frozenset(self.entries)

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Entries with a character that a glob or a regular expression gives a meaning; a dot is not one here."""
        return tuple(entry for entry in self.entries if not _LITERAL.fullmatch(entry))

    @cached_property
    def expert_entries(self) -> tuple[str, ...]:
        """Entries that speak of experts."""
        return tuple(entry for entry in self.entries if "experts" in entry)

    @cached_property
    def with_and_without_model(self) -> frozenset[str]:
        """Every entry with and without the leading `model.`, and without a trailing dot."""
        bare = {entry.removeprefix("model.").rstrip(".") for entry in self.entries}
        return frozenset(bare | {f"model.{entry}" for entry in bare})

    @cached_property
    def without_last_dot(self) -> frozenset[str]:
        """Every entry without a trailing dot."""
        return frozenset(entry.rstrip(".") for entry in self.entries)

    @cached_property
    def tails(self) -> frozenset[str]:
        """The last word of every entry."""
        return frozenset(entry.rpartition(".")[2] for entry in self.entries)

    @cached_property
    def globs(self) -> tuple[re.Pattern[str], ...]:
        """The special entries as SGLang reads them: a regular expression in which only `*` and the dot are escaped."""
        return tuple(_compile(entry.replace(".", r"\.").replace("*", ".*")) for entry in self.special)

    @cached_property
    def regexes(self) -> tuple[re.Pattern[str], ...]:
        """The `re:` entries of compressed-tensors."""
        return tuple(_compile(entry.removeprefix("re:")) for entry in self.entries if entry.startswith("re:"))

    @cached_property
    def prefixes(self) -> re.Pattern[str] | None:
        """All entries as transformers reads them: a regular expression up to a dot or the end."""
        alternatives = "|".join(f"(?:{entry})" for entry in self.entries)
        return _compile(rf"(?:{alternatives})(?:(?<=\.)|(?=\.|$))") if self.entries else None


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise EngineRefusesError(f"an ignore entry is no regular expression: {error}") from None


def _runs(path: str) -> Iterable[str]:
    """Every run of whole words of a dotted path: parents, children and what lies between."""
    words = path.split(".")
    return (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))


def _shards(path: str, packed: Packed) -> tuple[str, ...]:
    """The checkpoint's paths of a fused module's shards; none if it is not fused."""
    parent, dot, word = path.rpartition(".")
    return tuple(f"{parent}{dot}{shard}" for shard in packed.get(word, ()))


def _agree(path: str, skipped: list[bool]) -> bool:
    """What all shards of a fused module say. Raises EngineRefusesError if they differ."""
    if any(skipped) and not all(skipped):
        raise EngineRefusesError(f"some but not all shards of {path} are ignored")
    return all(skipped)


# ---- SGLang --------------------------------------------------------------------------------------------

# What SGLang unpacks where neither the model class nor the config says so.
_BUILT_IN_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# The last word of an entry, if one of these, hits every module whose own last word contains it, in every layer.
SGLANG_MODELOPT_TAILS = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})


def _boundary(names: frozenset[str], path: str, packed: Packed) -> bool:
    """A run of whole words of the path is listed; fused modules by their shards; experts by any entry below them."""
    shards = _shards(path, packed) or _shards(path, _BUILT_IN_PACKED)
    if shards:
        return _agree(path, [any(run in names for run in _runs(shard)) for shard in shards])
    if any(run in names for run in _runs(path)):
        return True
    return "experts" in path and any(path in entry for entry in names if "experts" in entry)


def sglang_fp8(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """fp8 and mxfp8, linears and experts: boundary match, entries with and without `model.`; no globs."""
    return _boundary(ignore.with_and_without_model, path, packed)


def sglang_modelopt(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """ModelOpt, linears and lm_head: boundary match, or the rule for experts."""
    return _boundary(ignore.without_last_dot, path, packed) or sglang_modelopt_experts(ignore, path, packed)


def sglang_modelopt_experts(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """ModelOpt, experts: a glob that matches the whole path or one of its words; and the rule of the tails."""
    del packed
    for candidate in {path, path.removeprefix("language_model.")}:
        words = candidate.split(".")
        if candidate in ignore.names or any(word in ignore.names for word in words):
            return True
        if any(glob.fullmatch(part) for glob in ignore.globs for part in (candidate, *words)):
            return True
        if any(tail in words[-1] for tail in SGLANG_MODELOPT_TAILS & ignore.tails):
            return True
    return False


def _sglang_ct_leaf(ignore: IgnoreList, path: str) -> bool:
    """A `re:` entry matches from the start, or the path or a tail of whole words is listed; never a parent."""
    words = path.split(".")
    if any(".".join(words[i:]) in ignore.names for i in range(len(words))):
        return True
    return any(regex.match(path) for regex in ignore.regexes)


def sglang_compressed_tensors(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """compressed-tensors, linears: a listed fused name, else the shards, which must agree, else the leaf."""
    shards = _shards(path, packed)
    if shards and path not in ignore.names:
        return _agree(path, [_sglang_ct_leaf(ignore, shard) for shard in shards])
    return _sglang_ct_leaf(ignore, path)


def sglang_compressed_tensors_experts(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """compressed-tensors, experts: decided from the names of expert 0."""
    return _from_expert_0(sglang_compressed_tensors, ignore, path, packed)


# ---- vLLM ----------------------------------------------------------------------------------------------


def vllm_fp8(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """fp8, linears and experts: the exact path; fused modules by name or by all shards; experts by an entry below."""
    shards = _shards(path, packed)
    if shards:
        return path in ignore.names or _agree(path, [shard in ignore.names for shard in shards])
    if "experts" in path:
        return any(path in entry for entry in ignore.expert_entries)
    return path in ignore.names


def vllm_modelopt(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """ModelOpt (and mxfp8): as fp8, or an entry is a substring of the path, or a shell pattern that matches it."""
    if vllm_fp8(ignore, path, packed):
        return True
    candidates = {path, path.removeprefix("language_model.")}
    if any(entry != path and entry in candidate for entry in ignore.entries for candidate in candidates):
        return True
    return any(fnmatchcase(path, entry) for entry in ignore.special)


def _vllm_ct_leaf(ignore: IgnoreList, path: str) -> bool:
    return path in ignore.names or any(regex.match(path) for regex in ignore.regexes)


def vllm_compressed_tensors(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """compressed-tensors, linears: exact or `re:`; a fused name first, else its shards, which must agree."""
    if _vllm_ct_leaf(ignore, path):
        return True
    shards = _shards(path, packed)
    return bool(shards) and _agree(path, [_vllm_ct_leaf(ignore, shard) for shard in shards])


def vllm_compressed_tensors_experts(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """compressed-tensors, experts: decided from the names of expert 0."""
    return _from_expert_0(vllm_compressed_tensors, ignore, path, packed)


# ---- transformers --------------------------------------------------------------------------------------


def transformers_fp8(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """fp8 and mxfp8: an entry as a regular expression matches from the start up to a dot or the end; or a suffix."""
    del packed
    if ignore.prefixes is not None and ignore.prefixes.match(path):
        return True
    # A suffix need not start at a dot, so all entries have to be asked; longer ones cannot match.
    return path.endswith(ignore.entries) if ignore.entries else False


def exact_or_regex(ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """compressed-tensors itself (in transformers): the exact path or a `re:` entry; nothing is fused."""
    del packed
    return _vllm_ct_leaf(ignore, path)


Rule = Callable[[IgnoreList, str, Packed], bool]


def _from_expert_0(rule: Rule, ignore: IgnoreList, path: str, packed: Packed) -> bool:
    """Whether the three projections of expert 0 are ignored. Raises EngineRefusesError if they differ."""
    skipped = [rule(ignore, f"{path}.0.{projection}", packed) for projection in EXPERT_PROJECTIONS]
    if any(skipped) and not all(skipped):
        raise EngineRefusesError(f"the projections of expert 0 of {path} have different schemes")
    return all(skipped)
