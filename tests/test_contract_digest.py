"""The digest of a contract, its JSON, and how two contracts are told apart."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pin_contracts
import pytest
import sample_models as sample

from lowprec.contract import Contract, TensorRule, canonical, first_difference, resolve
from lowprec.errors import ContractError
from lowprec.formats import get_format
from lowprec.recipe import Selector, list_recipes, load_recipe

PINNED = json.loads(pin_contracts.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", list_recipes())
def test_digest_is_pinned(name: str) -> None:
    """If this fails, every checkpoint made before is of another contract: pin anew only if that is meant."""
    pinned = PINNED[name]
    contract = sample.contract(name, pinned["model"])
    assert first_difference(pinned["contract"], contract.to_json()) == ""
    assert contract.digest == pinned["digest"]
    text = json.dumps(pinned["contract"], sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == pinned["digest"]


def test_all_recipes_are_pinned_apart() -> None:
    assert set(PINNED) == set(list_recipes())
    assert len({entry["digest"] for entry in PINNED.values()}) == len(PINNED)


@pytest.mark.parametrize("name", list_recipes())
def test_json_round_trip(name: str) -> None:
    contract = sample.contract(name, PINNED[name]["model"])
    again = Contract.from_json(json.loads(json.dumps(contract.to_json())))
    assert again == contract
    assert again.digest == contract.digest
    again.require_same(contract, "x")


def test_what_does_not_change_the_digest(tmp_path: Path) -> None:
    """Name, description, comments, order of words, a share or the count it comes to, inheritance or none."""
    base = sample.contract("nvfp4", "deepseek_v3")
    recipe = load_recipe("nvfp4")
    (rule,) = recipe.rules
    shuffled = dataclasses.replace(
        recipe,
        name="other",
        description="other",
        engines=recipe.engines[::-1],
        rules=(dataclasses.replace(rule, selector=Selector(roles=rule.selector.roles[::-1])),),
        policy=dataclasses.replace(recipe.policy, keep=recipe.policy.keep[::-1], last=1),
    )
    assert resolve(shuffled, sample.model("deepseek_v3")) == base
    (tmp_path / "x.toml").write_text('# a comment\nextends = "nvfp4"\ndescription = "mine"\n')
    assert resolve(load_recipe(tmp_path / "x.toml"), sample.model("deepseek_v3")).digest == base.digest
    model = sample.model("deepseek_v3")
    assert resolve(recipe, dataclasses.replace(model, family="x", tensors=model.tensors[::-1])).digest == base.digest


CHANGES = {
    "quantize_from=float32": "contract.quantize_from",
    "dtype=float16": "contract.dtype",
    "dialect=other": "contract.dialect",
    'engines=["sglang"]': "contract.engines",
    "policy.first=1": "contract.policy.first",
    "policy.last=0": "contract.policy.last",
    "policy.mtp=quantize": "contract.policy.mtp",
    'policy.keep=["norm"]': "contract.policy.keep",
    "backward.mode=dequantized": "contract.backward.mode",
    'rules.0.roles=["experts.up"]': "contract.rules.0.roles",
    "rules.0.layers=[1]": "contract.rules.0.layers",
    'rules.0.names=["model.layers.1.mlp.experts.*.up_proj.weight"]': "contract.rules.0.names",
    "rules.0.activation=keep": "contract.numerics",
    "rules.0.weight.outer=row": "contract.rules.0.weight.outer",
    "rules.0.weight.block=[16, 16]": "contract.numerics",
    "rules.0.weight.four_over_six=mae": "contract.numerics",
    "rules.0.activation.four_over_six=mse": "contract.numerics",
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_changes_the_digest_and_is_named(change: str) -> None:
    base, other = sample.contract("nvfp4", "deepseek_v3"), sample.contract("nvfp4", "deepseek_v3", [change])
    assert other.digest != base.digest
    assert other != base
    difference = first_difference(base.to_json(), other.to_json())
    assert difference.startswith((CHANGES[change], "contract.numerics"))
    with pytest.raises(ContractError, match="the checkpoint in x was made under another contract: contract"):
        base.require_same(other, "the checkpoint in x")


def option_changes() -> Iterator[tuple[str, str, str]]:
    """Every other value of every option of every format, as (recipe, format of the weight, override)."""
    yield from (
        ("fp8_block", "deepseek_v3", "rules.0.weight.rule=deepgemm"),
        ("fp8_block", "deepseek_v3", "rules.0.weight.rule=deepseek"),
        ("fp8_block", "deepseek_v3", "rules.0.weight.scale=pow2"),
        ("fp8_block", "deepseek_v3", "rules.0.weight.block=[64, 64]"),
        ("fp8_block", "deepseek_v3", "rules.0.activation.rule=deepgemm"),
        ("mxfp4_mxfp8", "deepseek_v3", "rules.0.weight.scale_rule=floor"),
        ("mxfp4_mxfp8", "deepseek_v3", "rules.0.weight.scale_rule=even"),
        ("int4_experts", "deepseek_v3", "rules.0.weight.group=128"),
        ("int4_experts", "deepseek_v3", "rules.0.weight.rule=amax7.5"),
    )


def test_every_option_changes_the_digest() -> None:
    digests = {sample.contract(name, kind, [change]).digest for name, kind, change in option_changes()}
    pinned = {entry["digest"] for entry in PINNED.values()}
    assert len(digests) == len(list(option_changes()))
    assert not digests & pinned


def test_model_is_part_of_the_digest() -> None:
    model = sample.model("deepseek_v3")
    contracts = [
        resolve(load_recipe("bf16"), changed)
        for changed in (
            model,
            dataclasses.replace(model, model_type="kimi_k2"),
            dataclasses.replace(model, num_layers=4),
            dataclasses.replace(model, num_mtp_layers=0),
        )
    ]
    assert len({contract.digest for contract in contracts}) == 4


def test_a_numeric_rule_of_a_format_is_part_of_the_contract() -> None:
    """A changed rule is a changed digest even where no option has changed."""
    content = sample.contract("nvfp4", "deepseek_v3").to_json()
    used = {json.loads(key)["outer"] for key in content["numerics"]}
    assert used == {"tensor", "row"}
    for key, rules in content["numerics"].items():
        words = {name: value for name, value in json.loads(key).items() if name != "format"}
        assert rules == get_format("nvfp4").describe(get_format("nvfp4").options.parse(words))
        assert len(rules) > 3


def paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the leaves and the tables."""
    if path:
        yield path
    children: Any = (
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    )
    for key, value in children:
        yield from paths(value, (*path, key))


# What another contract may say in that place.
POSSIBLE = (
    (None, ("rules", 0, "layers")),
    ([], ("rules", 0, "layers")),
    ([], ("policy", "keep")),
    ([], ("engines",)),
    ("x", ("model", "model_type")),
    ("x", ("dialect",)),
    (7, ("model", "num_layers")),
    (7, ("model", "num_mtp_layers")),
)


@pytest.mark.parametrize("damage", [None, True, 3.0, "x", [], {}, -1, 7])
def test_a_damaged_contract_is_refused_wherever_it_is_damaged(damage: Any) -> None:
    content = sample.contract("fp8_block", "deepseek_v3").to_json()
    places = list(paths(content))
    assert len(places) > 60
    for path in places:
        broken = copy.deepcopy(content)
        node = broken
        for key in path[:-1]:
            node = node[key]
        if canonical(node[path[-1]]) == canonical(damage):
            continue
        node[path[-1]] = damage
        try:
            read = Contract.from_json(broken)
        except ContractError:
            continue
        assert (damage, path) in POSSIBLE
        assert canonical(read.to_json()) == canonical(broken)
        assert read != sample.contract("fp8_block", "deepseek_v3")


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"b": 1, "a": 2}, {"b": 1, "a": 3}, "contract.a is 2 against 3"),
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": 2}}, "contract.a.y is only in the second"),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, "contract.a.y is only in the first"),
        ({"a": ["p", "r"]}, {"a": ["p", "q", "r"]}, "contract.a: 'q' is only in the second"),
        ({"a": ["p", "q"]}, {"a": ["q", "p"]}, 'contract.a.0 is "p" against "q"'),
        ({"a": ["p", "p"]}, {"a": ["p"]}, "contract.a has 2 entries against 1"),
        ({"a": [1, 2]}, {"a": [1, 3, 4]}, "contract.a.1 is 2 against 3"),
        ({"a": [{"x": 1}]}, {"a": [{"x": 1}, {"x": 2}]}, "contract.a has 1 entries against 2"),
        ({"a": 1}, {"a": True}, "contract.a is 1 against true"),
        ({"a": 1}, {"a": 1.0}, "contract.a is 1 against 1.0"),
        ({"a": 0.0}, {"a": -0.0}, "contract.a is 0.0 against -0.0"),
        ({"a": None}, {"a": {"x": 1}}, 'contract.a is null against {"x": 1}'),
        ({"a": []}, {"a": []}, ""),
        (3, 3, ""),
    ],
)
def test_first_difference(ours: Any, theirs: Any, said: str) -> None:
    assert first_difference(ours, theirs) == said
    assert bool(said) == (canonical(ours) != canonical(theirs))


def test_equal_rules_are_equal_records() -> None:
    words: dict[str, Any] = {"weight": None, "activation": None}
    one = TensorRule(roles=("b", "a"), layers=(2, 1), names=("y", "x"), **words)
    other = TensorRule(roles=("a", "b"), layers=(1, 2), names=("x", "y"), **words)
    assert one == other
    assert hash(one) == hash(other)


def test_not_a_number_is_no_difference() -> None:
    nan = float("nan")
    assert first_difference({"a": [nan]}, {"a": [float("nan")]}) == ""
    assert first_difference({"a": nan}, {"a": 1.0}) == "contract.a is NaN against 1.0"
