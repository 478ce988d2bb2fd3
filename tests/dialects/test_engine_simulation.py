"""The derived ignore list under every engine's rules: exactly what was quantized is served quantized."""

from __future__ import annotations

from typing import Any

import pytest
from small_plans import KINDS, SCHEMES, dialect_of, make_plan, plan_for

from lowprec.dialects import get_dialect
from lowprec.dialects.engine_modules import Kind, build_modules
from lowprec.dialects.engine_table import ENGINES
from lowprec.dialects.engines import Effect, expressible, ignore_list, simulate
from lowprec.errors import PlanError, RecipeError
from lowprec.formats.fp8_block import Fp8BlockOptions
from lowprec.plan import Plan
from lowprec.recipe import list_recipes, load_recipe

Json = dict[str, Any]

SPARSE = ("qwen3_moe", "deepseek_v3", "kimi_k2", "deepseek_v3_no_q_lora")
EXPERTS_ONLY = ("nvfp4_experts", "mxfp4_mxfp8", "int4_experts")
CASES = [
    (kind, name, first, last)
    for kind in KINDS
    for name in SCHEMES
    if kind in SPARSE or name not in EXPERTS_ONLY
    for first, last in ((2, 2), (0, 0), (0, 2))
]


def section_of(plan: Plan, name: str, ignore: tuple[str, ...] | None = None) -> Json:
    dialect = dialect_of(SCHEMES[name])
    section, _ = dialect.config(plan, ignore_list(plan, dialect) if ignore is None else ignore)
    assert section is not None
    return section


@pytest.mark.parametrize(("kind", "name", "first", "last"), CASES)
def test_every_engine_serves_exactly_what_was_quantized(kind: str, name: str, first: int, last: int) -> None:
    plan = make_plan(kind, SCHEMES[name], first=first, last=last)
    found = expressible(plan, dialect_of(SCHEMES[name]))
    assert found == dict.fromkeys(SCHEMES[name].engines, ())
    for engine in SCHEMES[name].engines:
        modules = build_modules(plan, ENGINES[engine])
        assert any(module.quantized for module in modules)
        assert any(not module.quantized for module in modules)


@pytest.mark.parametrize(("kind", "name", "first", "last"), CASES[::3])
def test_without_the_list_kept_modules_are_served_wrongly(kind: str, name: str, first: int, last: int) -> None:
    """The simulation sees every kept module that the method takes; so an empty result means something."""
    plan = make_plan(kind, SCHEMES[name], first=first, last=last)
    empty = section_of(plan, name, ())
    for engine in SCHEMES[name].engines:
        kept = {module.name for module in build_modules(plan, ENGINES[engine]) if not module.quantized}
        method = ENGINES[engine].methods[empty["quant_method"]]
        silent = {"lm_head"} if not method.lm_head else set()
        silent |= {name for name in kept if "head" in name and not method.lm_head}
        silent |= {name for name in kept if name.startswith("model.decoder") and not method.mtp}
        assert {problem.module for problem in simulate(plan, engine, empty)} == kept - silent


# For each scheme: an entry whose loss some engine does not forgive, by engine.
LOST = [
    ("qwen3", "fp8_block", "model.layers.1.self_attn.o_proj", ("sglang", "vllm", "transformers")),
    ("qwen3", "fp8_block", "model.layers.1.self_attn.q_proj", ("sglang", "transformers")),
    ("qwen3", "fp8_block", "lm_head", ("transformers",)),
    ("qwen3_moe", "fp8_block", "model.layers.1.mlp.gate", ("vllm",)),
    ("qwen3_moe", "fp8_block", "model.layers.1.mlp.experts", ("transformers",)),
    ("qwen3", "nvfp4", "lm_head", ("sglang", "vllm")),
    ("qwen3_moe", "nvfp4", "model.layers.1.mlp.experts", ("sglang",)),
    ("deepseek_v3", "nvfp4", "model.layers.1.self_attn.fused_qkv_a_proj", ("vllm",)),
    ("deepseek_v3", "nvfp4", "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa", ("sglang",)),
    ("deepseek_v3", "nvfp4", "model.layers.14.head", ("vllm",)),
    ("deepseek_v3", "nvfp4", "model.shared_head.head", ("sglang",)),
    ("deepseek_v3", "fp8_block_mtp_kept", "model.decoder.self_attn.o_proj", ("sglang",)),
    ("deepseek_v3", "fp8_block_mtp_kept", "model.layers.14.self_attn.o_proj", ("vllm",)),
    ("qwen3", "int4", "model.layers.1.self_attn.qkv_proj", ("sglang",)),
    ("qwen3_moe", "int4_experts", "model.layers.1.mlp.experts.0.up_proj", ("sglang", "vllm")),
    ("deepseek_v3", "int4_experts", "model.decoder.mlp.experts.0.up_proj", ("sglang",)),
    ("deepseek_v3", "int4_experts", "model.layers.5.self_attn.kv_b_proj", ("sglang", "vllm")),
]


@pytest.mark.parametrize(("kind", "name", "entry", "engines"), LOST)
def test_a_lost_entry_is_reported(kind: str, name: str, entry: str, engines: tuple[str, ...]) -> None:
    plan = make_plan(kind, SCHEMES[name])
    whole = ignore_list(plan, dialect_of(SCHEMES[name]))
    assert entry in whole
    section = section_of(plan, name, tuple(item for item in whole if item != entry))
    assert {engine for engine in SCHEMES[name].engines if simulate(plan, engine, section)} == set(engines)


# An entry that swallows quantized modules, and a module that it hits, by engine.
SWALLOWED = [
    ("qwen3", "fp8_block", "model.layers.5", {"sglang": "o_proj", "transformers": "o_proj"}),
    ("qwen3_moe", "fp8_block", "model.layers.5.mlp.experts.1.up_proj", {"sglang": "experts", "vllm": "experts"}),
    ("qwen3_moe", "nvfp4", "model.layers.5.mlp", {"sglang": "", "vllm": "experts"}),
    ("qwen3", "nvfp4", "model.layers.1", {"sglang": "", "vllm": "self_attn.o_proj"}),
    ("deepseek_v3", "nvfp4", "model.layers.1.self_attn.q_b_proj", {"sglang": "q_b_proj", "vllm": ""}),
    ("qwen3", "mxfp8_vllm", "model.layers.5.mlp.gate", {"sglang": "", "vllm": "gate_up_proj"}),
    ("qwen3", "int4", "self_attn.o_proj", {"sglang": "o_proj", "vllm": ""}),
    ("qwen3", "int4", "re:.*layers.5", {"sglang": "o_proj", "vllm": "o_proj"}),
]


@pytest.mark.parametrize(("kind", "name", "entry", "hits"), SWALLOWED)
def test_an_entry_that_swallows_a_quantized_module_is_reported(
    kind: str, name: str, entry: str, hits: dict[str, str]
) -> None:
    plan = make_plan(kind, SCHEMES[name])
    section = section_of(plan, name, (*ignore_list(plan, dialect_of(SCHEMES[name])), entry))
    for engine in SCHEMES[name].engines:
        modules = [problem.module for problem in simulate(plan, engine, section)]
        hit = hits.get(engine, "")
        assert bool(modules) == bool(hit)
        assert not hit or any(module.endswith(hit) for module in modules)


def test_the_list_is_what_it_says() -> None:
    """Golden: dense, one kept layer at the end, an untied head."""
    plan = make_plan("qwen3", SCHEMES["fp8_block"], layers=3, first=0, last=1)
    block = "model.layers.2"
    assert ignore_list(plan, get_dialect("deepseek_fp8")) == (
        "lm_head",
        f"{block}.mlp.down_proj",
        f"{block}.mlp.gate_proj",
        f"{block}.mlp.gate_up_proj",
        f"{block}.mlp.up_proj",
        f"{block}.self_attn.k_proj",
        f"{block}.self_attn.o_proj",
        f"{block}.self_attn.q_proj",
        f"{block}.self_attn.qkv_proj",
        f"{block}.self_attn.v_proj",
    )


def test_layers_are_in_order_of_their_number() -> None:
    plan = make_plan("qwen3", SCHEMES["fp8_block"], layers=12, first=3, last=2)
    outs = [name for name in ignore_list(plan, get_dialect("deepseek_fp8")) if name.endswith("o_proj")]
    assert outs == [f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1, 2, 10, 11)]


def test_a_tail_that_hits_every_layer_becomes_a_glob() -> None:
    plan = make_plan("deepseek_v3", SCHEMES["nvfp4"])
    names = ignore_list(plan, get_dialect("modelopt_nvfp4"))
    assert "model.layers.1.self_attn.q_b_proj*" in names
    assert "model.layers.1.self_attn.q_b_proj" not in names
    assert "model.layers.1.self_attn.kv_b_proj" in names, "kept in every layer, so its tail may hit every layer"


def test_mtp_layers_have_their_name_in_sglang() -> None:
    plan = make_plan("deepseek_v3", SCHEMES["int4_experts"])
    names = ignore_list(plan, get_dialect("compressed_tensors"))
    for name in ("self_attn.o_proj", "mlp.experts", "mlp.experts.1.gate_proj", "mlp.shared_experts.gate_up_proj"):
        assert f"model.layers.14.{name}" in names
        assert f"model.decoder.{name}" in names
    assert "model.layers.14.eh_proj" in names


def test_a_plan_that_quantizes_nothing_has_no_list() -> None:
    scheme = SCHEMES["fp8_block"]
    plan = make_plan("qwen3", scheme, layers=3, first=0, last=0)
    nothing = Plan(contract=plan.contract, steps=tuple(step for step in plan.steps if step.weight is None))
    assert ignore_list(nothing, get_dialect("bf16")) == ()


# ---- what cannot be expressed --------------------------------------------------------------------------


def test_one_excluded_expert() -> None:
    scheme = SCHEMES["fp8_block"]
    plan = make_plan("qwen3_moe", scheme, keep_names=("model.layers.5.mlp.experts.1.*.weight",))
    found = expressible(plan, dialect_of(scheme))
    for engine in scheme.engines:
        (line,) = found[engine]
        assert line.startswith("model.layers.5.mlp.experts does not load: routed experts of which some are quantized")


@pytest.mark.parametrize(
    ("kind", "scheme", "name", "module"),
    [
        ("qwen3", "fp8_block", "model.layers.5.self_attn.k_proj.weight", "model.layers.5.self_attn.qkv_proj"),
        ("qwen3", "nvfp4", "model.layers.5.mlp.up_proj.weight", "model.layers.5.mlp.gate_up_proj"),
        ("deepseek_v3", "mxfp8_vllm", "model.layers.5.self_attn.q_a_proj.weight", "model.layers.5.self_attn.fused_qkv"),
    ],
)
def test_shards_of_a_fused_module_that_differ(kind: str, scheme: str, name: str, module: str) -> None:
    plan = make_plan(kind, SCHEMES[scheme], keep_names=(name,))
    found = expressible(plan, dialect_of(SCHEMES[scheme]))
    for engine in ("sglang", "vllm"):
        assert any(line.startswith(module) and "fused linear of which some are" in line for line in found[engine])
    assert found.get("transformers", ()) == (), "transformers does not fuse"


def test_nvfp4_mtp_layers_are_unquantized_in_sglang() -> None:
    scheme = SCHEMES["fp8_block"]
    quantizing = {**vars(SCHEMES["nvfp4"]), "mtp": scheme.mtp}
    plan = make_plan("deepseek_v3", type(scheme)(**quantizing))
    found = expressible(plan, get_dialect("modelopt_nvfp4"))
    assert found["vllm"] == ()
    assert any("model.decoder" in line and "built unquantized" in line for line in found["sglang"])


@pytest.mark.parametrize(
    ("engine", "scheme", "message"),
    [
        ("vllm", "mxfp8", "the checkpoint is served wrongly: vLLM reads weight_scale"),
        ("transformers", "mxfp8_vllm", "transformers reads weight_scale_inv"),
        ("transformers", "nvfp4", "the checkpoint does not load: transformers has no quantizer"),
        ("sglang", "mxfp4_dense", "does not load|do not load"),
    ],
)
def test_an_engine_without_a_loader(engine: str, scheme: str, message: str) -> None:
    chosen = SCHEMES[scheme]
    plan = make_plan("qwen3", type(chosen)(**{**vars(chosen), "engines": (engine,)}))
    (line,) = expressible(plan, dialect_of(chosen))[engine]
    assert any(part in line for part in message.split("|"))


@pytest.mark.parametrize(("kept", "message"), [(0, ""), (1, "takes every routed expert of a compressed-tensors")])
def test_transformers_wants_all_experts_of_compressed_tensors(kept: int, message: str) -> None:
    chosen = SCHEMES["int4_experts"]
    scheme = type(chosen)(**{**vars(chosen), "engines": ("transformers",)})
    plan = make_plan("qwen3_moe", scheme, layers=3, first=0, last=kept)
    lines = expressible(plan, dialect_of(scheme))["transformers"]
    assert bool(lines) == bool(message)
    assert not message or message in lines[0]


def test_mxfp4_experts_are_dropped_by_sglang() -> None:
    chosen = SCHEMES["mxfp4_mxfp8"]
    plan = make_plan("qwen3_moe", type(chosen)(**{**vars(chosen), "engines": ("sglang", "vllm")}))
    found = expressible(plan, dialect_of(chosen))
    assert found["vllm"] == ()
    assert "are served wrongly: SGLang's loader drops experts named weight_packed" in found["sglang"][0]


def test_an_unknown_engine_is_named() -> None:
    chosen = SCHEMES["fp8_block"]
    plan = make_plan("qwen3", type(chosen)(**{**vars(chosen), "engines": ("vlm",)}))
    with pytest.raises(PlanError, match="unknown engine 'vlm' \\(did you mean 'vllm'"):
        expressible(plan, dialect_of(chosen))


def test_a_method_that_an_engine_does_not_have() -> None:
    plan = make_plan("qwen3", SCHEMES["fp8_block"])
    (problem,) = simulate(plan, "transformers", {"quant_method": "modelopt"})
    assert problem.effect is Effect.DOES_NOT_LOAD
    assert "no quant_method 'modelopt'" in problem.reason


def test_compressed_tensors_without_the_target_linear() -> None:
    plan = make_plan("qwen3", SCHEMES["int4"])
    section = section_of(plan, "int4")
    section["config_groups"]["group_0"]["targets"] = ["Embedding"]
    assert {problem.effect for problem in simulate(plan, "sglang", section)} == {Effect.DOES_NOT_LOAD}
    assert {problem.effect for problem in simulate(plan, "vllm", section)} == {Effect.SERVED_WRONG}


# ---- sizes ---------------------------------------------------------------------------------------------

O_PROJ, K_PROJ = "model.layers.5.self_attn.o_proj.weight", "model.layers.5.self_attn.k_proj.weight"
Q_A, KV_A = "model.layers.5.self_attn.q_a_proj.weight", "model.layers.5.self_attn.kv_a_proj_with_mqa.weight"
SIZES = [
    # kind, tensor and its shape, tp, what SGLang and vLLM say, what transformers says
    ("qwen3", O_PROJ, (256, 256), 1, "", ""),
    ("qwen3", O_PROJ, (130, 256), 1, "", "attention.o: N = 130 is not a multiple of 128"),
    ("qwen3", O_PROJ, (256, 192), 1, "attention.o: K = 192 is not", "attention.o: K = 192 is not a multiple of 128"),
    ("qwen3", K_PROJ, (64, 256), 1, "attention.k: N = 64 is not a multiple of the block size 128", ""),
    ("deepseek_v3", KV_A, (192, 256), 1, "", "mla.kv_down: N = 192 is not a multiple of 128"),
    ("deepseek_v3", Q_A, (96, 256), 1, "mla.q_down: N = 96 is not a multiple of the block size 128", ""),
]


@pytest.mark.parametrize(("kind", "name", "shape", "tp", "engines", "hugging_face"), SIZES)
def test_fp8_blocks_must_not_straddle_shards(
    kind: str, name: str, shape: tuple[int, int], tp: int, engines: str, hugging_face: str
) -> None:
    plan = make_plan(kind, SCHEMES["fp8_block"], sizes={name: shape})
    found = expressible(plan, get_dialect("deepseek_fp8"), tp)
    for engine, message in (("sglang", engines), ("vllm", engines), ("transformers", hugging_face)):
        lines = [line for line in found[engine] if line.startswith(name.removesuffix(".weight"))]
        assert len(lines) == bool(message)
        assert not message or message in lines[0]


def test_transformers_takes_wrong_blocks_silently_where_they_divide() -> None:
    """192 rows in 2 blocks: transformers takes 96 each, and says nothing; 576 in 5 it refuses."""
    sizes = {O_PROJ: (192, 256), KV_A: (576, 256)}
    (wrong,) = expressible(
        make_plan("qwen3", SCHEMES["fp8_block"], sizes={O_PROJ: sizes[O_PROJ]}), get_dialect("deepseek_fp8")
    )["transformers"]
    assert "is served wrongly" in wrong
    (fails,) = expressible(
        make_plan("deepseek_v3", SCHEMES["fp8_block"], sizes={KV_A: sizes[KV_A]}), get_dialect("deepseek_fp8")
    )["transformers"]
    assert "does not load" in fails


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("fp8_block", 2, "over 2 ranks is not a multiple of the block size 128"),
        ("mxfp8", 4, ""),
        ("mxfp8", 8, "experts.down: K = 128 over 8 ranks is not a multiple of the block size 32"),
        ("nvfp4", 8, ""),
        ("nvfp4", 16, "experts.down: K = 128 over 16 ranks is not a multiple of the block size 16"),
    ],
)
def test_ranks_cut_between_blocks(name: str, tp: int, message: str) -> None:
    plan = make_plan("qwen3_moe", SCHEMES[name], layers=3, first=0, last=1)
    lines = expressible(plan, dialect_of(SCHEMES[name]), tp)["sglang"]
    assert bool(lines) == bool(message)
    assert not message or any(message in line for line in lines)


def test_few_key_value_heads_are_replicated() -> None:
    """K of 128 rows over 2 ranks would be half a block; engines give each rank the whole head instead."""
    plan = make_plan("qwen3", SCHEMES["fp8_block"], layers=3, first=0, last=1)
    lines = expressible(plan, get_dialect("deepseek_fp8"), 2)["sglang"]
    assert not [line for line in lines if "attention.k" in line or "attention.v" in line]


def test_any_block_size_counts() -> None:
    chosen = SCHEMES["fp8_block"]
    smaller = type(chosen)(**{**vars(chosen), "weight": Fp8BlockOptions(block=(64, 64))})
    plan = make_plan("qwen3", smaller, sizes={K_PROJ: (64, 256)})
    assert expressible(plan, get_dialect("deepseek_fp8")) == dict.fromkeys(chosen.engines, ())


# ---- the recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list_recipes())
def test_every_engine_of_a_recipe_loads_what_it_makes(name: str, kind: str) -> None:
    recipe = load_recipe(name)
    roles = {role for rule in recipe.rules if rule.weight is not None for role in rule.selector.roles}
    if roles and kind not in SPARSE and all(role.startswith(("experts.", "shared_experts.")) for role in roles):
        with pytest.raises(RecipeError, match="matches no tensor"):
            plan_for(kind, recipe)
        return
    plan = plan_for(kind, recipe)
    assert expressible(plan, get_dialect(recipe.dialect)) == dict.fromkeys(recipe.engines, ())
    assert recipe.engines


def test_routers_are_linears_only_where_the_engine_builds_them_so() -> None:
    for kind, expected in (("qwen3_moe", {"vllm"}), ("deepseek_v3", set()), ("kimi_k2", set())):
        plan = make_plan(kind, SCHEMES["fp8_block"])
        found = {
            engine.name
            for engine in ENGINES.values()
            if any(module.name.endswith("mlp.gate") for module in build_modules(plan, engine))
        }
        assert found == expected


def test_fused_modules_by_engine() -> None:
    plan = make_plan("deepseek_v3", SCHEMES["fp8_block"], layers=3, first=0, last=1)
    names = {
        engine.name: {
            module.name.rpartition(".")[2] for module in build_modules(plan, engine) if module.kind is Kind.FUSED
        }
        for engine in ENGINES.values()
    }
    assert names == {
        "sglang": {"fused_qkv_a_proj_with_mqa", "gate_up_proj"},
        "vllm": {"fused_qkv_a_proj", "gate_up_proj"},
        "transformers": set(),
    }
