"""Recipes: what ships, what a user may write, and what is said when it is wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lowprec.dialects import engine_table
from lowprec.errors import RecipeError
from lowprec.recipe import (
    ENGINES,
    Backward,
    Mtp,
    Recipe,
    Selector,
    list_recipes,
    load_recipe,
    recipe_text,
)
from lowprec.roles import KEPT_ROLES, LINEAR_ROLES

OWN = Path(__file__).parent / "recipes" / "own.toml"
CHILD = Path(__file__).parent / "recipes" / "child.toml"

BASE = """\
schema_version = 1
name = "mine"
description = "for tests"
dialect = "sglang_mxfp8"
engines = ["sglang"]
quantize_from = "bfloat16"

[[rules]]
roles = ["mlp.up"]
weight = { format = "mxfp8" }
activation = { format = "mxfp8" }

[policy]
first = 0
last = "15%"
mtp = "keep"
keep = ["norm"]

[backward]
mode = "quantized"
"""

# ---- what ships -----------------------------------------------------------------------------------------

SHIPPED = {  # recipe: dialect, engines, weight format, backward
    "bf16": ("bf16", {"sglang", "vllm", "transformers"}, None, "high_precision"),
    "fp8_block": ("deepseek_fp8", {"sglang", "vllm", "transformers"}, "fp8_block", "quantized"),
    "fp8_block_ue8m0": ("deepseek_fp8", {"sglang", "vllm", "transformers"}, "fp8_block", "quantized"),
    "int4_experts": ("compressed_tensors", {"sglang", "vllm"}, "int4_group", "dequantized"),
    "mxfp4_dense": ("compressed_tensors", {"vllm"}, "mxfp4", "dequantized"),
    "mxfp4_mxfp8": ("compressed_tensors", {"vllm"}, "mxfp4", "dequantized"),
    "mxfp8": ("sglang_mxfp8", {"sglang", "transformers"}, "mxfp8", "quantized"),
    "nvfp4": ("modelopt_nvfp4", {"sglang", "vllm"}, "nvfp4", "high_precision"),
    "nvfp4_experts": ("modelopt_nvfp4", {"sglang", "vllm"}, "nvfp4", "high_precision"),
}
EXPERTS = {"experts.gate", "experts.up", "experts.down"}
SHARED = {"shared_experts.gate", "shared_experts.up", "shared_experts.down"}
ABSORBED = {"mla.kv_up", "mla.k_up", "mla.v_up"}
QUANTIZED = {
    "bf16": set(),
    "fp8_block": set(LINEAR_ROLES),
    "fp8_block_ue8m0": set(LINEAR_ROLES),
    "int4_experts": EXPERTS,
    "mxfp4_dense": {role for role in LINEAR_ROLES if role.startswith(("attention.", "mlp."))},
    "mxfp4_mxfp8": EXPERTS,
    "mxfp8": set(LINEAR_ROLES) - ABSORBED,
    "nvfp4": set(LINEAR_ROLES) - ABSORBED,
    "nvfp4_experts": EXPERTS | SHARED,
}


def test_the_list_is_complete() -> None:
    assert list_recipes() == tuple(sorted(SHIPPED))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str) -> None:
    recipe = load_recipe(name)
    dialect, engines, weight, backward = SHIPPED[name]
    assert (recipe.name, recipe.dialect, set(recipe.engines)) == (name, dialect, engines)
    assert {rule.weight.format for rule in recipe.rules if rule.weight} == ({weight} if weight else set())
    assert recipe.backward is Backward(backward)
    assert recipe.quantize_from == recipe.dtype == "bfloat16"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_roles_and_policy(name: str) -> None:
    """What the issue says of every recipe: which roles, which layers, what stays."""
    recipe = load_recipe(name)
    selected = {role for rule in recipe.rules for role in rule.selector.roles}
    assert selected == QUANTIZED[name]
    assert recipe.policy.first == 0
    assert recipe.policy.last == (0 if name == "bf16" else "15%")
    assert recipe.policy.mtp is (Mtp.QUANTIZE if "fp8" in name and "mxfp4" not in name else Mtp.KEEP)
    one_dimensional = not name.startswith("fp8_block") and name != "bf16"
    assert set(recipe.policy.keep) == set(KEPT_ROLES) | (ABSORBED if one_dimensional else set())


def test_shipped_options() -> None:
    """The numeric choices, in the words of the issue."""

    def rule(name: str) -> tuple[Any, Any]:
        (only,) = load_recipe(name).rules
        weight, activation = only.weight, only.activation
        return weight and weight.to_json(), activation and activation.to_json()

    for name, scale in (("fp8_block", "fp32"), ("fp8_block_ue8m0", "pow2")):
        words = {"format": "fp8_block", "rule": "te", "scale": scale}
        assert rule(name) == ({**words, "block": [128, 128]}, {**words, "block": [1, 128]})
    nvfp4 = {"format": "nvfp4", "block": [1, 16], "four_over_six": "none", "e4m3_max": 448}
    for name in ("nvfp4", "nvfp4_experts"):
        assert rule(name) == ({**nvfp4, "outer": "tensor"}, {**nvfp4, "outer": "row"})
    mxfp4 = {"format": "mxfp4", "scale_rule": "rceil"}
    assert rule("mxfp4_mxfp8") == rule("mxfp4_dense") == (mxfp4, {"format": "mxfp8"})
    assert rule("int4_experts") == ({"format": "int4_group", "group": 32, "rule": "amax7"}, None)
    assert rule("mxfp8") == ({"format": "mxfp8"}, {"format": "mxfp8"})


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_text_says_why(name: str) -> None:
    text = recipe_text(name)
    assert text.startswith("# ")
    assert "[policy]" in text or "extends" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_ue8m0_differs_from_its_parent_in_the_scale_alone() -> None:
    parent, child = load_recipe("fp8_block"), load_recipe("fp8_block_ue8m0")
    assert child.policy == parent.policy
    assert child.backward == parent.backward
    assert [rule.selector for rule in child.rules] == [rule.selector for rule in parent.rules]
    assert recipe_text("fp8_block").replace('"fp32"', '"pow2"').count('"pow2"') == 2
    assert recipe_text("fp8_block_ue8m0").count('"pow2"') == 2


# ---- what a user writes ---------------------------------------------------------------------------------


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    return load_recipe(write(folder, text), overrides)


def test_own_recipe() -> None:
    recipe = load_recipe(OWN)
    assert recipe.name == "own"  # not its parent's
    assert recipe.dialect == "sglang_mxfp8"
    assert [rule.selector for rule in recipe.rules] == [
        Selector(names=("model.layers.*.mlp.experts.3.*.weight",)),
        Selector(roles=("attention.o",), last=1),
        Selector(roles=("experts.gate", "experts.up", "experts.down")),
        Selector(roles=("attention.o", "mla.q_up"), layers=(1, 2)),
    ]
    assert [rule.weight and rule.weight.format for rule in recipe.rules] == [None, None, "mxfp8", "fp8_block"]
    assert recipe.policy.last == 0
    assert recipe.policy.keep == load_recipe("mxfp8").policy.keep


def test_extends_merges_key_by_key_and_replaces_rules_as_a_whole() -> None:
    parent, child = load_recipe(OWN), load_recipe(CHILD)
    assert child.name == "my child"
    assert child.description == parent.description
    assert child.rules == parent.rules
    assert (child.policy.mtp, child.policy.last) == (Mtp.KEEP, 0)
    assert len(load_recipe("mxfp8").rules) == 1


@pytest.mark.parametrize("form", ["a.toml", "./a.toml", "../{folder}/a.toml"])
def test_extends_in_a_circle(tmp_path: Path, form: str) -> None:
    write(tmp_path, 'extends = "./b.toml"', "a.toml")
    write(tmp_path, f'extends = "{form.format(folder=tmp_path.name)}"', "b.toml")
    with pytest.raises(RecipeError, match=r"a\.toml' extends itself: .*a\.toml -> .*b\.toml -> .*a\.toml$"):
        load_recipe(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "mxpf8"', "unknown recipe 'mxpf8' (did you mean 'mxfp8'?)"),
        ('extends = "no/such.toml"', "cannot be read"),
        ("extends = 3", "extends must be the name or path of a recipe"),
        ("extends = ", "is not valid TOML"),
        ('extend = "mxfp8"', "unknown key 'extend' (did you mean 'extends'?)"),
    ],
)
def test_extends_what_is_not_there(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        load(tmp_path, text)


def test_a_path_is_never_taken_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mxfp8").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("mxfp8")).name == "mine"
    assert load_recipe("mxfp8").name == "mxfp8"


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_unreadable(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"recipe file '.*x\.toml' cannot be read"):
        load_recipe(path)


@pytest.mark.parametrize(("text", "said"), [("x = " + "[" * 9999, "nested too deeply"), ("#" * 1_000_001, "no recipe")])
def test_files_that_are_no_recipes(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load(tmp_path, text)


def test_a_device_is_no_recipe() -> None:
    with pytest.raises(RecipeError, match="'/dev/zero' is no recipe: it has more than 1000000 bytes"):
        load_recipe("/dev/zero")


# Each row: what is replaced in BASE, by what, and what the message must say.
WRONG = [
    ("schema_version = 1", "schema_version = 2", "schema_version 2 is not known; this lowprec reads 1"),
    ("schema_version = 1", "schema_version = true", "schema_version True is not known"),
    ("schema_version = 1\n", "", "key 'schema_version' is missing"),
    ("dialect = ", "dialekt = ", "unknown key 'dialekt' (did you mean 'dialect'?)"),
    ('dialect = "sglang_mxfp8"', "dialect = 3", "dialect must be a string"),
    ('engines = ["sglang"]', 'engines = ["sglnag"]', "unknown engine 'sglnag' (did you mean 'sglang'?)"),
    ('engines = ["sglang"]', "engines = []", "must name an engine (known: sglang, vllm, transformers)"),
    ('engines = ["sglang"]', 'engines = "sglang"', "engines' must be a list of strings"),
    ('engines = ["sglang"]', 'engines = ["sglang", "sglang"]', "names something twice"),
    ('"bfloat16"', '"bf16"', "quantize_from' = 'bf16' is not known (did you mean 'bfloat16'?)"),
    ('name = "mine"', "name = 1", "name must be a string"),
    ("[[rules]]", "[[rule]]", "unknown key 'rule' (did you mean 'rules'?)"),
    ("[[rules]]", "[rules]", "rules must be a list of tables"),
    ("roles = ", "role = ", "rules.0': unknown key 'role' (did you mean 'roles'?)"),
    ('["mlp.up"]', '["mlp.upp"]', "rules.0.roles': unknown role 'mlp.upp' (did you mean 'mlp.up'?)"),
    ('["mlp.up"]', '["expert.up"]', "unknown role 'expert.up' (did you mean 'experts.up'?)"),
    ('["mlp.up"]', '["router"]', "role 'router' is never quantized"),
    ('["mlp.up"]', "[]", "selects nothing: give roles or names"),
    ('["mlp.up"]', '["mlp.up"]\nlayers = { frist = 1 }', "unknown key 'frist' (did you mean 'first'?)"),
    ('["mlp.up"]', '["mlp.up"]\nlayers = { first = -1 }', "must be a number of layers such as 2 or a share"),
    ('["mlp.up"]', '["mlp.up"]\nlayers = { first = 1, last = 1 }', "must be a list of layer indices"),
    ('["mlp.up"]', '["mlp.up"]\nlayers = [true]', "must be a list of layer indices"),
    ('["mlp.up"]', '["mlp.up"]\nlayers = []', "must be a list of layer indices"),
    ('weight = { format = "mxfp8" }\n', "", "rules.0': key 'weight' is missing"),
    ('weight = { format = "mxfp8" }', 'weight = "kep"', 'must be "keep" or a table with a format'),
    ('weight = { format = "mxfp8" }', 'weight = "keep"', "activations cannot be quantized where the weight is kept"),
    (
        'weight = { format = "mxfp8" }',
        'weight = { format = "mxpf8" }',
        "unknown format 'mxpf8' (did you mean 'mxfp8'?)",
    ),
    (
        'weight = { format = "mxfp8" }',
        'weight = { format = "mxfp4" }',
        "must state every option of mxfp4; missing: scale",
    ),
    (
        'weight = { format = "mxfp8" }',
        'weight = { format = "mxfp4", scale_rule = "rciel" }',
        "rules.0.weight': mxfp4: scale_rule cannot be 'rciel' (did you mean 'rceil'?)",
    ),
    (
        'weight = { format = "mxfp8" }',
        'weight = { format = "mxfp4", scale_rul = "rceil" }',
        "unknown option 'scale_rul' (did you mean 'scale_rule'?)",
    ),
    ("first = 0\n", "", "policy': key 'first' is missing"),
    ("first = 0", "firts = 0", "policy': unknown key 'firts' (did you mean 'first'?)"),
    ("first = 0", "first = true", "policy.first' = True must be a number of layers"),
    ('"15%"', '"15"', "policy.last' = '15' must be a number of layers such as 2 or a share such as \"15%\""),
    ('"15%"', '"101%"', "policy.last' = '101%' must be"),
    ('"15%"', '"1.5%"', "policy.last' = '1.5%' must be"),
    ('"15%"', "0.15", "policy.last' = 0.15 must be"),
    ('mtp = "keep"', 'mtp = "quantise"', "policy.mtp' = 'quantise' is not known (did you mean 'quantize'?)"),
    ('keep = ["norm"]', 'keep = ["norms"]', "policy.keep': unknown role 'norms' (did you mean 'norm'?)"),
    ("[policy]\n", "", "key 'policy' is missing"),
    (
        'mode = "quantized"',
        'mode = "quantised"',
        "backward.mode' = 'quantised' is not known (did you mean 'quantized'?)",
    ),
    ('mode = "quantized"', "", "backward': key 'mode' is missing"),
    ("[backward]", "[backwards]", "unknown key 'backwards' (did you mean 'backward'?)"),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG, ids=[f"{new!r:.40}" for _, new, _ in WRONG])
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert BASE.count(old) >= 1
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, BASE.replace(old, new, 1))
    message = str(caught.value)
    assert said in message
    assert "mine.toml" in message
    assert "\n" not in message


@pytest.mark.parametrize("key", list(tomllib.loads(BASE)))
def test_every_key_must_be_there(tmp_path: Path, key: str) -> None:
    lines = BASE.split("\n\n")
    if key in ("rules", "policy", "backward"):
        text = "\n\n".join(part for part in lines if not part.startswith((f"[{key}]", f"[[{key}]]")))
    else:
        text = re.sub(rf"^{key} = .*\n", "", BASE, flags=re.MULTILINE)
    if key == "name":  # a file's own name stands in
        assert load(tmp_path, text).name == "mine"
        return
    with pytest.raises(RecipeError, match=f"key '{key}' is missing"):
        load(tmp_path, text)


# ---- --set ----------------------------------------------------------------------------------------------


def test_set(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        BASE,
        "policy.last=0",
        "policy.mtp=quantize",
        'policy.keep=["norm", "bias"]',
        "policy.first=10%",
        "rules.0.activation=keep",
        'rules.0.weight={ format = "mxfp4", scale_rule = "floor" }',
        "rules.0.weight.scale_rule=even",
        "dtype=float32",
    )
    assert (recipe.policy.last, recipe.policy.first, recipe.policy.mtp) == (0, "10%", Mtp.QUANTIZE)
    assert recipe.policy.keep == ("norm", "bias")
    (rule,) = recipe.rules
    assert rule.activation is None
    assert rule.weight is not None
    assert rule.weight.to_json() == {"format": "mxfp4", "scale_rule": "even"}
    assert recipe.dtype == "float32"


def test_set_does_not_reach_another_load() -> None:
    load_recipe("fp8_block_ue8m0", ["policy.last=0", "rules.0.weight.scale=fp32"])
    assert load_recipe("fp8_block_ue8m0").policy.last == "15%"
    assert load_recipe("fp8_block_ue8m0").rules[0].weight == load_recipe("fp8_block_ue8m0").rules[0].weight


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("policy.last", "override 'policy.last' must look like policy.last=0"),
        ("=0", "must look like"),
        ("policy..last=0", "must look like"),
        ("polcy.last=0", "no key 'polcy' (did you mean 'policy'?)"),
        ("policy.lst=0", "unknown key 'lst' (did you mean 'last'?)"),
        ("policy.last.x=0", "'policy.last' has no keys below it"),
        ("rules.1.weight=keep", "rules.1 must be an index below 1"),
        ("rules.x.weight=keep", "rules.x must be an index below 1"),
        ("rules.²=keep", "rules.² must be an index below 1"),
        ("rules.0.weight.rule=tee", "unknown option 'rule'"),
        ("policy.last=", "policy.last' = '' must be"),
        ("policy.keep=norm", "must be a list of strings"),
        ("engines=[vllm]", "must be a list of strings"),
        ("extends=mxfp8", "a parent cannot be set"),
        ("policy.last=0\npolicy.first=1", "sets more than 'policy.last'; repeat --set for each key"),
        ("rules=" + "[" * 9999, "override 'rules': its value is nested too deeply"),
        ("rules=[]x", "rules must be a list of tables"),
    ],
)
def test_set_wrong(tmp_path: Path, item: str, said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        load(tmp_path, BASE, item)


def test_unknown_recipe() -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe 'fp8_blok' \(did you mean 'fp8_block'\?\)"):
        load_recipe("fp8_blok")
    with pytest.raises(RecipeError, match=r"unknown recipe 'zzz' \(known: bf16, .*nvfp4_experts\)"):
        recipe_text("zzz")
    assert RecipeError.exit_code == 2


def test_engines_are_those_of_the_dialects() -> None:
    """The table in recipe.py stands below the dialects, which simulate these engines."""
    assert set(ENGINES) == set(engine_table.ENGINES)
