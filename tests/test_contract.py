"""The contract: what it decides, and what a recipe may not ask of a model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pin_contracts
import pytest
import sample_models as sample

from lowprec.contract import (
    Contract,
    Model,
    ModelTensor,
    TensorRule,
    count_layers,
    glob_to_regex,
    resolve,
)
from lowprec.errors import RecipeError
from lowprec.formats import get_format
from lowprec.recipe import Rule, Selector, list_recipes, load_recipe
from lowprec.roles import LINEAR_ROLES

OWN = Path(__file__).parent / "recipes" / "own.toml"
PINNED = json.loads(pin_contracts.FILE.read_text(encoding="utf-8"))

# ---- layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "layers", "kept"),
    [
        ("15%", 3, 1), ("15%", 30, 5), ("15%", 48, 7), ("15%", 61, 9), ("15%", 36, 5), ("15%", 4, 1),
        ("15%", 2, 0), ("15%", 1, 0), ("0%", 61, 0), ("100%", 61, 61), ("50%", 2, 0), ("1%", 30, 1),
        (0, 61, 0), (2, 2, 2), (1, 1, 1),
    ],
)  # fmt: skip
def test_count_layers(count: int | str, layers: int, kept: int) -> None:
    assert count_layers(count, layers, "policy.last") == kept


def test_more_layers_than_there_are() -> None:
    with pytest.raises(RecipeError, match=r"policy\.last = 4, but the model has 3 decoder layers"):
        sample.contract("mxfp8", "qwen3", ["policy.last=4"])


# ---- what it decides ------------------------------------------------------------------------------------


def tensor(name: str, role: str, layer: int | None = None, expert: int | None = None) -> ModelTensor:
    return ModelTensor(name=name, role=role, layer=layer, expert=expert)


def test_policy_is_asked_before_rules() -> None:
    contract = sample.contract("mxfp8", "deepseek_v3", ["policy.first=1"])

    def reason(role: str, layer: int | None) -> str:
        return contract.rule_for(tensor("x.weight", role, layer)).reason

    assert reason("experts.up", 1) == "rules.0: experts.up"
    assert reason("experts.up", 0) == "policy.first: 1 of 3 layers"
    assert reason("experts.up", 2) == "policy.last: 1 of 3 layers"
    assert reason("experts.up", 3) == "rules.0: experts.up"  # MTP
    assert reason("mtp.proj", 3) == "policy.keep: mtp.proj"
    assert reason("mla.kv_up", 1) == "policy.keep: mla.kv_up"
    assert reason("embedding", None) == "policy.keep: embedding"
    assert sample.contract("nvfp4", "deepseek_v3").rule_for(tensor("x", "experts.up", 3)).reason == "policy.mtp: keep"


def test_first_full_match_wins() -> None:
    """Of tests/recipes/own.toml on three layers: expert 3 kept, o_proj kept in the last layer, two formats."""
    contract = resolve(load_recipe(OWN), sample.model("deepseek_v3"))

    def decision(name: str, role: str, layer: int, expert: int | None = None) -> str:
        rule = contract.rule_for(tensor(name, role, layer, expert)).rule
        return rule.weight.format if rule and rule.weight else "keep"

    assert decision("model.layers.1.mlp.experts.3.up_proj.weight", "experts.up", 1, 3) == "keep"
    assert decision("model.layers.1.mlp.experts.2.up_proj.weight", "experts.up", 1, 2) == "mxfp8"
    assert decision("model.layers.0.self_attn.o_proj.weight", "attention.o", 0) == "keep"
    assert decision("model.layers.1.self_attn.o_proj.weight", "attention.o", 1) == "fp8_block"
    assert decision("model.layers.2.self_attn.o_proj.weight", "attention.o", 2) == "keep"
    assert decision("model.layers.2.self_attn.q_b_proj.weight", "mla.q_up", 2) == "fp8_block"
    assert decision("model.layers.2.self_attn.q_a_proj.weight", "mla.q_down", 2) == "keep"


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("model.layers.*.mlp.up_proj.weight", "model.layers.10.mlp.up_proj.weight", True),
        ("model.layers.1.*", "model.layers.1.x", True),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj.weight", False),  # * does not cross a dot
        ("model.layers.1.*.*.weight", "model.layers.10.mlp.up_proj.weight", False),
        ("model.layers.?.mlp.*", "model.layers.10.mlp.x", False),
        ("model.layers.?.mlp.*", "model.layers.9.mlp.x", True),
        ("?", ".", False),
        ("mlp.gate", "mlp.gate_up_proj", False),
        ("mlp.gate", "mlpxgate", False),  # a dot is a dot
        ("up_proj.weight", "model.up_proj.weight", False),
        ("*", "lm_head", True),
        ("[ab]", "a", False),
    ],
)
def test_globs_match_in_full_and_do_not_cross_dots(glob: str, name: str, matches: bool) -> None:
    assert bool(glob_to_regex(glob).fullmatch(name)) is matches


def test_a_rule_matches_whole_names() -> None:
    rule = TensorRule(roles=(), layers=None, names=("a.*.b", "c"), weight=None, activation=None)
    assert [rule.matches(tensor(name, "mlp.up")) for name in ("a.x.b", "c", "a.x.b.weight", "x.c", "cc", "C")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip


# ---- recipes and models ---------------------------------------------------------------------------------

FITS = {
    "qwen3": {"bf16", "fp8_block", "fp8_block_ue8m0", "mxfp4_dense", "mxfp8", "nvfp4"},
    "qwen3_moe": set(list_recipes()),
    "deepseek_v3": set(list_recipes()),
}
HINTS = {  # recipe: what the message recommends for the dense model
    "nvfp4_experts": "; recipe nvfp4 would fit",
    "mxfp4_mxfp8": "; recipe mxfp4_dense would fit",
    "int4_experts": "; recipe fp8_block or fp8_block_ue8m0 or mxfp4_dense or mxfp8 or nvfp4 would fit",
}


@pytest.mark.parametrize("kind", sample.KINDS)
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_resolves_where_it_fits(name: str, kind: str) -> None:
    if name not in FITS[kind]:
        with pytest.raises(RecipeError) as caught:
            sample.contract(name, kind)
        assert str(caught.value) == f"recipe '{name}': rules.0 matches no tensor of this {kind} model{HINTS[name]}"
        return
    contract = sample.contract(name, kind)
    decided = Counter(contract.rule_for(item).rule is not None for item in sample.model(kind).tensors)
    assert decided[True] > 0 or name == "bf16"
    assert decided[False] > 0
    roles = {item.role for item in sample.model(kind).tensors if contract.rule_for(item).rule is not None}
    assert roles <= set(LINEAR_ROLES) & {role for rule in load_recipe(name).rules for role in rule.selector.roles}


def with_rules(*rules: tuple[Selector, str | None]) -> Contract:
    """mxfp8 with other rules, on the small DeepSeek-V3: (selector, format or None to keep)."""
    made = tuple(
        Rule(selector=selector, weight=get_format(name).options.parse({}) if name else None, activation=None)
        for selector, name in rules
    )
    return resolve(dataclasses.replace(load_recipe("mxfp8"), rules=made), sample.model("deepseek_v3"))


UP = Selector(roles=("experts.up",))


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([(Selector(roles=("attention.q",)), "mxfp8")], "rules.0 matches no tensor of this deepseek_v3 model; "),
        ([(UP, "mxfp8"), (UP, None)], "rules.1 never acts: earlier rules take every tensor that it matches"),
        ([(UP, "mxfp8"), (Selector(roles=("experts.up",), layers=(1,)), "mxfp8")], "rules.1 never acts"),
        ([(Selector(names=("model.layer.*",)), None)], "rules.0: the name 'model.layer.*' matches no tensor"),
        ([(Selector(names=("model.layers.*",)), None)], "rules.0: the name 'model.layers.*' matches no tensor"),
        ([(Selector(roles=("experts.up",), layers=(0,)), "mxfp8")], "rules.0 matches no tensor"),
        ([(Selector(roles=("experts.up",), layers=(1, 4)), "mxfp8")], "rules.0.layers: there is no layer 4"),
        ([(Selector(roles=("experts.up",), last=4), "mxfp8")], "rules.0.layers.last = 4, but the model has 3"),
    ],
)  # fmt: skip
def test_a_selector_that_does_nothing_is_refused(rules: list[tuple[Selector, str | None]], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        with_rules(*rules)
    assert said in str(caught.value)


def test_a_glob_cannot_quantize_what_is_never_quantized() -> None:
    recipe = dataclasses.replace(
        load_recipe("mxfp8", ["policy.keep=[]"]),
        rules=(Rule(selector=Selector(names=("model.layers.*.mlp.gate.*",)), weight=with_mxfp8(), activation=None),),
    )
    said = r"matches 'model\.layers\.1\.mlp\.gate\.e_score_correction_bias', and role 'router\.bias' is never quantized"
    with pytest.raises(RecipeError, match=said):
        resolve(recipe, sample.model("deepseek_v3"))
    kept = dataclasses.replace(recipe.policy, keep=("router", "router.bias"))
    resolve(dataclasses.replace(recipe, policy=kept), sample.model("deepseek_v3"))


def with_mxfp8() -> Any:
    return get_format("mxfp8").options.parse({})


def test_what_is_no_fault() -> None:
    """Keeping what is not there, sharing tensors with an earlier rule, naming an absent role among others."""
    with_rules((Selector(roles=("vision", "attention.q")), None), (UP, "mxfp8"))
    with_rules((Selector(roles=("experts.up",), layers=(1,)), None), (UP, "mxfp8"))
    with_rules((Selector(roles=("experts.up", "attention.q")), "mxfp8"))
    with_rules((Selector(roles=("experts.up",), last="15%"), "mxfp8"))


def test_an_empty_model_fits_nothing_but_bf16() -> None:
    empty = Model(family="x", model_type="x", num_layers=1, num_mtp_layers=0, tensors=())
    assert resolve(load_recipe("bf16"), empty).rules == ()
    with pytest.raises(RecipeError, match=r"matches no tensor of this x model$"):
        resolve(load_recipe("mxfp8"), empty)
