"""Families: the names come from transformers, the roles are checked against the modules that hold the tensors."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_models as sample
from hypothesis import given
from hypothesis import strategies as st

from lowprec.contract import ModelTensor
from lowprec.converters import family as family_module
from lowprec.converters.family import Family, builtin_families, find_family
from lowprec.errors import PlanError
from lowprec.roles import KEPT_ROLES, LINEAR_ROLES, ROLES

# ---- against transformers -------------------------------------------------------------------------------

DENSE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40,
}  # fmt: skip
MOE = {**DENSE, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}
MLA = {
    **{key: value for key, value in DENSE.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", DENSE),
    "llama with biases": ("llama", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**DENSE, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", DENSE),
    "qwen3": ("qwen3", DENSE),
    "qwen3 with biases": ("qwen3", {**DENSE, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe with biases": ("qwen3_moe", {**MOE, "attention_bias": True}),
    "qwen3_moe with a dense layer": ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}),
    "qwen3_moe sparse every second": ("qwen3_moe", {**MOE, "decoder_sparse_step": 2}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v3 without a query latent": ("deepseek_v3", {**MLA, "q_lora_rank": None}),
    "deepseek_v3 with biases": ("deepseek_v3", {**MLA, "attention_bias": True}),
    "deepseek_v3 all dense": ("deepseek_v3", {**MLA, "first_k_dense_replace": 3}),
    "deepseek_v3 all sparse": ("deepseek_v3", {**MLA, "first_k_dense_replace": 0, "n_shared_experts": 2}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_that_transformers_saves(variant: str, tmp_path: Path) -> None:
    """Role by role against the class of the module that owns the parameter, which knows nothing of our templates."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, options = VARIANTS[variant]
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**options))
    module.save_pretrained(tmp_path)
    config = module.config.to_dict()
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        names = list(file.keys())
    tensors = {item.name: item for item in find_family(model_type).model(config, names).tensors}
    assert set(tensors) == set(names)

    owners = dict(module.named_modules())
    for name in module.state_dict():
        owner = owners[name.rpartition(".")[0]]
        kind = type(owner).__name__
        if kind.endswith("Experts"):
            pieces = [item for key, item in tensors.items() if key.startswith(name.rpartition(".")[0] + ".")]
            count = options.get("num_experts") or options["n_routed_experts"]
            assert Counter(item.role for item in pieces) == dict.fromkeys(EXPERTS, count)
            assert {item.expert for item in pieces} == set(range(count))
            continue
        if options.get("tie_word_embeddings") and name == "lm_head.weight":
            assert name not in tensors
            continue
        role = tensors[name].role
        if name.endswith("bias"):
            assert role == ("router.bias" if "Router" in kind else "bias")
        elif "Norm" in kind or "Router" in kind or isinstance(owner, torch.nn.Embedding):
            assert role == ("norm" if "Norm" in kind else "router" if "Router" in kind else "embedding")
        else:
            assert isinstance(owner, torch.nn.Linear)
            assert role in LINEAR_ROLES or name == "lm_head.weight"
            assert LINEAR_NAMES[name.split(".")[-2]] == role.rpartition(".")[2]
        assert tensors[name].layer == (int(name.split(".")[2]) if ".layers." in name else None)


EXPERTS = ("experts.gate", "experts.up", "experts.down")
LINEAR_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "lm_head": "lm_head",
    "q_a_proj": "q_down", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down", "kv_b_proj": "kv_up",
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_published_sizes(model_type: str) -> None:
    """The default configs have the depth of published models; parameters on the meta device cost nothing."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        names = list(AutoModelForCausalLM.from_config(config).state_dict())
    model = find_family(model_type).model(config.to_dict(), names)
    assert (model.num_layers, len(model.tensors)) == (config.num_hidden_layers, len(names))
    assert max(item.layer for item in model.tensors if item.layer is not None) == config.num_hidden_layers - 1


# ---- names ----------------------------------------------------------------------------------------------

ALL_TEMPLATES = [
    pytest.param(family, text, role, id=f"{family.name}:{text}")
    for family in builtin_families()
    for text, role in family.templates.items()
]


@pytest.mark.parametrize(("family", "text", "role"), ALL_TEMPLATES)
def test_a_template_and_its_tensor(family: Family, text: str, role: str) -> None:
    layer, expert = 61 if "{layer}" in text else None, 383 if "{expert}" in text else None
    name = text.replace("{layer}", "61").replace("{expert}", "383")
    assert family.locate(name) == ModelTensor(name=name, role=role, layer=layer, expert=expert)
    for wrong in (name + "x", "x" + name, name.replace("61", "061"), name.replace("61", "x"), name + ".weight"):
        if wrong != name:
            with pytest.raises(PlanError):
                family.locate(wrong)


@given(layer=st.integers(0, 10**9 - 1), expert=st.integers(0, 10**9 - 1))
def test_indices(layer: int, expert: int) -> None:
    name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
    located = find_family("kimi_k2").locate(name)
    assert (located.layer, located.expert, located.role) == (layer, expert, "experts.up")


@given(name=st.text(alphabet="abmodel.layers#{}0123456789²٣ \n", max_size=60))
def test_any_other_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        find_family("qwen3").locate(name)
    assert "has no role in family 'llama' (nearest: '" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("model.layers.3.mlp.gate_up_proj.weight", "model.layers.{layer}.mlp.gate_proj.weight"),
        ("model.layers.3.self_attn.qproj.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.layers.#.mlp.up_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight_scale_inv", "model.layers.{layer}.mlp.up_proj.weight"),
        ("model.layers.9999999999.mlp.up_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
    ],
)
def test_an_unknown_name_shows_the_nearest_template(name: str, near: str) -> None:
    said = (
        f"tensor '{name}' has no role in family 'llama' (nearest: '{near}'); if the model does have it, add a template"
    )
    with pytest.raises(PlanError, match=re.escape(said)):
        find_family("qwen3").locate(name)


def test_frequencies_of_old_checkpoints_are_kept() -> None:
    """Engines compute rotary_emb.inv_freq themselves and skip it; what a checkpoint holds is carried over."""
    names = [item.name for item in sample.sources("qwen3")]
    names += [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)]
    model = sample.family("qwen3").model(sample.config("qwen3"), names)
    assert Counter(item.role for item in model.tensors)["rotary"] == 3


# ---- config.json against the tensors --------------------------------------------------------------------


def without(names: list[str], part: str) -> list[str]:
    left = [name for name in names if part not in name]
    assert len(left) < len(names)
    return left


L = "model.layers."
INCONSISTENT: list[tuple[str, dict[str, Any], Any, str]] = [  # model, changes of config.json, of the names, message
    ("qwen3", {"num_hidden_layers": None}, None, "config.json: key 'num_hidden_layers' is missing"),
    ("qwen3", {"num_hidden_layers": 0}, None, "num_hidden_layers = 0 must be a number of at least 1"),
    ("qwen3", {"num_hidden_layers": "3"}, None, "num_hidden_layers = '3' must be a number"),
    ("qwen3", {"num_hidden_layers": True}, None, "num_hidden_layers = True must be a number"),
    ("qwen3", {"num_hidden_layers": 2}, None, "is in layer 2, but config.json has 2 decoder layers and 0 for MTP"),
    ("qwen3", {"num_hidden_layers": 4}, None, "layer 3 is missing: config.json has 4 decoder layers"),
    ("qwen3", {"model_type": "gemma"}, None, "config.json: model_type 'gemma' is not of family 'llama'"),
    ("qwen3", {"model_type": None}, None, "config.json: model_type None is not of family 'llama'"),
    ("qwen3", {}, lambda names: without(names, f"{L}1."), "layer 1 is missing"),
    ("qwen3", {}, lambda names: without(names, "embed_tokens"), "tensor 'model.embed_tokens.weight' is missing"),
    ("qwen3", {}, lambda names: without(names, "lm_head"), "'lm_head.weight' is missing from the source and"),
    ("qwen3", {}, lambda names: without(names, f"{L}2.mlp.up"), "layer 2 has no 'model.layers.{layer}.mlp.up"),
    ("qwen3", {}, lambda names: without(names, f"{L}0.mlp.up"), "layer 0 has no 'model.layers.{layer}.mlp.up"),
    ("qwen3", {}, lambda names: [*names, "lm_head.weight"], "tensor 'lm_head.weight' occurs twice in the source"),
    ("qwen3_moe", {"num_local_experts": None}, None, "config.json: key 'num_experts' is missing"),
    ("qwen3_moe", {"num_experts": 5}, None, "layer 0 lacks expert 4 of 'model.layers.{layer}.mlp.experts."),
    ("qwen3_moe", {"num_experts": 3}, None, "layer 0 has expert 3 of"),
    ("qwen3_moe", {}, lambda names: without(names, "1.mlp.experts.2.up"), "layer 1 lacks expert 2 of"),
    ("qwen3_moe", {}, lambda names: without(names, ".mlp.experts."), "layer 0 lacks expert 0 of"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, None, "layer 1 has routed experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, None, "it does not say which layers have experts"),
    ("qwen3_moe", {"mlp_only_layers": 3}, None, "it does not say which layers have experts"),
    ("qwen3_moe", {}, lambda names: [*names, f"{L}0.mlp.up_proj.weight"], "layer 0 has a dense"),
    ("deepseek_v3", {"first_k_dense_replace": 0}, None, "layer 0 has a dense 'model.layers.{layer}.mlp."),
    ("deepseek_v3", {"num_nextn_predict_layers": -1}, None, "predict_layers = -1 must be a number of at least 0"),
    ("deepseek_v3", {}, lambda names: [*names, f"{L}1.eh_proj.weight"], "belongs to MTP but is in layer 1"),
    (
        "deepseek_v3",
        {"num_nextn_predict_layers": 2},
        lambda names: [*names, f"{L}3.eh_proj.weight"],
        "layer 4 is missing",
    ),
    (
        "deepseek_v3",
        {"num_nextn_predict_layers": 0},
        lambda names: [*names, f"{L}3.eh_proj.weight"],
        "is in layer 3, but config.json has 3 decoder layers and 0 for MTP",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "rename", "said"), INCONSISTENT, ids=[row[3][:60] for row in INCONSISTENT])
def test_config_and_tensors_that_disagree(kind: str, changes: dict[str, Any], rename: Any, said: str) -> None:
    config = {key: value for key, value in {**sample.config(kind), **changes}.items() if value is not None}
    names = [item.name for item in sample.sources(kind)]
    with pytest.raises(PlanError, match=re.escape(said)):
        sample.family(kind).model(config, rename(names) if rename else names)


def test_mtp_layers_may_be_left_out() -> None:
    """transformers and most trainers save DeepSeek-V3 without them; the contract is that of the whole model."""
    model = sample.model("deepseek_v3")
    assert (model.num_layers, model.num_mtp_layers) == (3, 1)
    assert not any(item.role.startswith("mtp.") for item in model.tensors)
    config = {key: value for key, value in sample.config("deepseek_v3").items() if key != "num_nextn_predict_layers"}
    assert sample.family("deepseek_v3").model(config, [item.name for item in model.tensors]).num_mtp_layers == 0


def test_a_tied_model_needs_no_head() -> None:
    names = without([item.name for item in sample.sources("qwen3")], "lm_head")
    model = sample.family("qwen3").model({**sample.config("qwen3"), "tie_word_embeddings": True}, names)
    assert "lm_head" not in {item.role for item in model.tensors}


# ---- finding and declaring ------------------------------------------------------------------------------


def test_families_are_found_by_model_type() -> None:
    found = {name: family.name for family in builtin_families() for name in family.model_types}
    assert found == {
        "llama": "llama", "qwen2": "llama", "qwen3": "llama", "qwen3_moe": "qwen3_moe",
        "deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3",
    }  # fmt: skip
    assert sum(len(family.model_types) for family in builtin_families()) == len(found)  # none twice
    assert all(find_family(name).name == family for name, family in found.items())


def test_an_unknown_model_type_says_what_is_known_and_how_to_add_one() -> None:
    with pytest.raises(PlanError) as caught:
        find_family("qwen33")
    said = str(caught.value)
    assert said.startswith(
        "model_type 'qwen33' is not known (did you mean 'qwen3'?); known: deepseek_v3, kimi_k2, llama"
    )
    assert "converters/families/<name>.py" in said
    assert "lowprec.families" in said
    with pytest.raises(PlanError, match=r"model_type 'gpt2' is not known; known: "):
        find_family("gpt2")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with a family: its module and its metadata, as pip lays them down."""
    info = tmp_path / "other_families-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-families\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lowprec.families]\ntiny = other_families:FAMILY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    family_module._plugin_families.cache_clear()
    yield tmp_path / "other_families.py"
    sys.modules.pop("other_families", None)
    family_module._plugin_families.cache_clear()


def test_a_family_of_another_package(plugin: Path) -> None:
    plugin.write_text(
        "from lowprec.converters.family import Family\n"
        "TEMPLATES = {'w.{layer}.0.x': 'mlp.up', 'n': 'norm'}\n"
        "FAMILY = Family(name='tiny', model_types=('tiny', 'llama'), templates=TEMPLATES)\n"
    )
    family = find_family("tiny")
    assert family.name == "tiny"
    assert find_family("llama").name == "llama"  # ours stay ours
    model = family.model({"model_type": "tiny", "num_hidden_layers": 2}, ["w.1.0.x", "w.0.0.x", "n"])
    assert [(item.name, item.layer) for item in model.tensors] == [("n", None), ("w.0.0.x", 0), ("w.1.0.x", 1)]
    with pytest.raises(PlanError, match=r"nearest: 'w\.\{layer\}\.0\.x'"):
        family.locate("w.0.1.x")  # a number of the template itself must be that number


def test_an_entry_point_that_leads_to_no_family(plugin: Path) -> None:
    plugin.write_text("FAMILY = 3\n")
    with pytest.raises(PlanError, match=r"entry point 'tiny' of lowprec\.families is a int, no Family"):
        find_family("tiny")


@pytest.mark.parametrize(
    ("templates", "said"),
    [
        ({"x.weight": "mlp.upp"}, "template 'x.weight': unknown role 'mlp.upp' (did you mean 'mlp.up'?)"),
        ({"a.{block}.weight": "mlp.up"}, "only .{layer}. and .{expert}., each once and between dots"),
        ({"a.{layer}.b.{layer}.weight": "mlp.up"}, "each once"),
        ({"a.x{layer}.weight": "mlp.up"}, "between dots"),
        ({"{layer}.weight": "mlp.up"}, "between dots"),
        ({"a.{}.weight": "mlp.up"}, "each once and between dots"),
    ],
)
def test_a_wrong_declaration(templates: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        Family(name="x", model_types=("x",), templates=templates)


def test_roles() -> None:
    assert not set(LINEAR_ROLES) & set(KEPT_ROLES)
    assert set(ROLES) == set(LINEAR_ROLES) | set(KEPT_ROLES)
