"""The plan: every tensor once, why, who shares an amax, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import sample_models as sample

from lowprec.contract import resolve
from lowprec.converters.family import find_family
from lowprec.errors import PlanError
from lowprec.formats import get_format
from lowprec.plan import DTYPE_BYTES, Action, Plan, SourceTensor, Step, TensorInfo, build_plan
from lowprec.recipe import list_recipes, load_recipe
from lowprec.roles import LINEAR_ROLES, PARTNERS

FITTING = [
    (name, kind) for name in list_recipes() for kind in sample.KINDS
    if not (kind == "qwen3" and name in ("int4_experts", "mxfp4_mxfp8", "nvfp4_experts"))
]  # fmt: skip


def steps_of(plan: Plan) -> dict[str, Step]:
    return {step.tensor.name: step for step in plan.steps}


def quantized(plan: Plan) -> set[str]:
    return {step.tensor.name for step in plan.steps if step.action is Action.QUANTIZE}


# ---- every tensor once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_every_tensor_once_with_a_reason(name: str, kind: str) -> None:
    plan = sample.plan(name, kind)
    assert [step.tensor.name for step in plan.steps] == sorted(item.name for item in sample.sources(kind))
    for step in plan.steps:
        assert step.source.name == step.tensor.name
        assert step.tensor == sample.family(kind).locate(step.tensor.name)
        decision = plan.contract.rule_for(step.tensor)
        assert (step.rule, step.reason) == (decision.rule, decision.reason)
        assert re.fullmatch(r"rules\.0: .+|policy\.(keep|first|last|mtp): .+|no rule matches", step.reason)
        assert step.action is (Action.QUANTIZE if step.rule else Action.KEEP)
        assert step.action is Action.KEEP or step.tensor.role in LINEAR_ROLES
        assert step.dtype == step.source.dtype


def test_what_is_quantized_of_a_small_dense_model() -> None:
    """Three layers, the last one kept: all seven linears of two layers, nothing else."""
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    expected = {f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in linears}
    for name in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense"):
        assert quantized(sample.plan(name, "qwen3")) == expected


def test_what_is_quantized_of_a_small_mixture() -> None:
    """One dense layer, one of experts, one kept. The router's gate is not the MLP's gate."""
    names = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    experts = {f"model.layers.1.mlp.experts.{expert}.{name}" for expert in range(4) for name in names}
    shared = {f"model.layers.1.mlp.shared_experts.{name}" for name in names}
    assert quantized(sample.plan("mxfp4_mxfp8", "deepseek_v3")) == experts
    assert quantized(sample.plan("nvfp4_experts", "deepseek_v3")) == experts | shared
    fp8, mxfp8 = (quantized(sample.plan(name, "deepseek_v3")) for name in ("fp8_block", "mxfp8"))
    assert fp8 - mxfp8 == {f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 1)}
    assert not mxfp8 - fp8
    assert "model.layers.1.mlp.gate.weight" not in fp8
    assert "model.layers.0.mlp.gate_proj.weight" in fp8


def test_mtp_layers_follow_the_policy() -> None:
    extra = [sample.source(f"model.layers.3.{name}.weight", shape) for name, shape in MTP_TENSORS.items()]
    for recipe, wanted in (("fp8_block", {"self_attn.o_proj"}), ("nvfp4", set())):
        contract = sample.contract(recipe, "deepseek_v3")
        steps = steps_of(build_plan(contract, sample.family("deepseek_v3"), [*sample.sources("deepseek_v3"), *extra]))
        found = {name for name in MTP_TENSORS if steps[f"model.layers.3.{name}.weight"].action is Action.QUANTIZE}
        assert found == wanted


MTP_TENSORS: dict[str, tuple[int, ...]] = {
    "self_attn.o_proj": (256, 256),
    "eh_proj": (256, 512),
    "enorm": (256,),
    "embed_tokens": (320, 256),
    "shared_head.head": (320, 256),
}


def dense(layers: int) -> list[SourceTensor]:
    """A dense model's tensors with the smallest shapes."""
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    found = [sample.source(name, (32, 32)) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    found.append(sample.source("model.norm.weight", (32,)))
    for layer in range(layers):
        found += [sample.source(f"model.layers.{layer}.{name}.weight", (32, 32)) for name in names]
        found.append(sample.source(f"model.layers.{layer}.input_layernorm.weight", (32,)))
    return found


def plan_of(model_type: str, config: dict[str, Any], index: Sequence[SourceTensor], *overrides: str) -> Plan:
    """A plan under mxfp8 for any tensors."""
    family = find_family(model_type)
    model = family.model({"model_type": model_type, **config}, [item.name for item in index])
    return build_plan(resolve(load_recipe("mxfp8", overrides), model), family, index)


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        (["policy.last=0", "rules.0.layers=[1]"], {1}),
        (["policy.last=0", 'rules.0.names=["model.layers.1.*.*.weight"]'], {1}),
        (["policy.last=0", 'rules.0.names=["model.layers.1?.*.*.weight"]'], set(range(10, 20))),
        (["policy.last=0", "rules.0.layers={first=2}"], {0, 1}),
        (["policy.last=1", "policy.first=1", "rules.0.layers={last=2}"], {18}),
        (["policy.last=15%"], set(range(17))),
    ],
)
def test_layer_1_is_not_layers_10_to_19(overrides: list[str], layers: set[int]) -> None:
    plan = plan_of("qwen3", {"num_hidden_layers": 20}, dense(20), *overrides)
    found = Counter(step.tensor.layer for step in plan.steps if step.action is Action.QUANTIZE)
    assert found == dict.fromkeys(layers, 7)


# ---- partners -------------------------------------------------------------------------------------------


def test_partners() -> None:
    """gate with up, expert by expert; q with k with v; q_a with kv_a; in the order in which engines fuse them."""
    moe = steps_of(sample.plan("nvfp4", "qwen3_moe"))
    attention = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    for name in attention:
        assert moe[name].partners == attention
    for expert in range(4):
        pair = tuple(f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up"))
        assert moe[pair[0]].partners == moe[pair[1]].partners == pair
    assert moe["model.layers.0.self_attn.o_proj.weight"].partners == ()
    assert moe["model.layers.0.mlp.experts.0.down_proj.weight"].partners == ()

    latent = steps_of(sample.plan("nvfp4", "deepseek_v3"))
    pair = tuple(f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert latent[pair[0]].partners == latent[pair[1]].partners == pair
    pair = tuple(f"model.layers.1.mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up"))
    assert latent[pair[1]].partners == pair
    pair = tuple(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert latent[pair[0]].partners == pair


@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_partners_are_symmetric_and_only_where_there_is_something_to_share(name: str, kind: str) -> None:
    steps = steps_of(sample.plan(name, kind))
    grouped = {role for group in PARTNERS for role in group}
    for step in steps.values():
        assert bool(step.partners) == (
            name.startswith("nvfp4") and step.action is Action.QUANTIZE and step.tensor.role in grouped
        )
        for other in step.partners:
            assert steps[other].partners == step.partners
            assert steps[other].weight == step.weight
            assert steps[other].tensor.layer == step.tensor.layer
            assert steps[other].tensor.expert == step.tensor.expert
        assert not step.partners or step.tensor.name in step.partners


def test_a_kept_tensor_is_no_partner() -> None:
    """With v kept the other two still share; a gate whose up is kept has nobody to share with."""
    roles = '["attention.q", "attention.k", "experts.gate"]'
    steps = steps_of(sample.plan("nvfp4", "qwen3_moe", [f"rules.0.roles={roles}"]))
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    assert steps[q].partners == steps[k].partners == (q, k)
    assert steps[v].partners == ()
    assert steps["model.layers.0.mlp.experts.0.gate_proj.weight"].partners == ()


def test_partners_may_come_from_different_rules() -> None:
    recipe = load_recipe("nvfp4")
    (rule,) = recipe.rules
    gate = dataclasses.replace(rule, selector=dataclasses.replace(rule.selector, roles=("mlp.gate",)), activation=None)
    contract = resolve(dataclasses.replace(recipe, rules=(gate, rule)), sample.model("qwen3"))
    steps = steps_of(build_plan(contract, sample.family("qwen3"), sample.sources("qwen3")))
    assert len(steps["model.layers.0.mlp.gate_proj.weight"].partners) == 2


def test_row_scales_are_not_shared() -> None:
    plan = sample.plan("nvfp4", "qwen3_moe", ["rules.0.weight.outer=row"])
    assert not any(step.partners for step in plan.steps)


def test_partners_of_other_options_are_none() -> None:
    recipe = load_recipe("nvfp4")
    (rule,) = recipe.rules
    assert rule.weight is not None
    square = get_format("nvfp4").options.parse({**options(rule.weight), "block": [16, 16]})
    gate = dataclasses.replace(rule, selector=dataclasses.replace(rule.selector, roles=("mlp.gate",)), weight=square)
    other = dataclasses.replace(recipe, rules=(gate, rule))
    contract = resolve(other, sample.model("qwen3"))
    steps = steps_of(build_plan(contract, sample.family("qwen3"), sample.sources("qwen3")))
    assert steps["model.layers.0.mlp.gate_proj.weight"].partners == ()
    assert steps["model.layers.0.mlp.up_proj.weight"].partners == ()
    assert len(steps["model.layers.0.self_attn.q_proj.weight"].partners) == 3


def options(weight: Any) -> dict[str, Any]:
    return {key: value for key, value in weight.to_json().items() if key != "format"}


# ---- what is refused ------------------------------------------------------------------------------------

O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def changed(kind: str, name: str, **changes: Any) -> Iterator[SourceTensor]:
    """The sources with one of them changed."""
    for item in sample.sources(kind):
        yield dataclasses.replace(item, **changes) if item.name == name else item


def build(recipe: str, kind: str, index: Iterable[SourceTensor], *overrides: str) -> Plan:
    return build_plan(sample.contract(recipe, kind, overrides), sample.family(kind), list(index))


@pytest.mark.parametrize(
    ("recipe", "shape", "said"),
    [
        ("mxfp8", (256, 48), f"tensor '{O_PROJ}' of shape [256, 48]: mxfp8:"),
        ("nvfp4", (256, 40), f"tensor '{O_PROJ}' of shape [256, 40]: nvfp4:"),
        ("mxfp4_dense", (256, 16), f"tensor '{O_PROJ}' of shape [256, 16]: mxfp4:"),
        ("fp8_block", (256,), f"tensor '{O_PROJ}' of shape [256]: fp8_block:"),
    ],
)
def test_a_shape_that_does_not_fit(recipe: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        build(recipe, "qwen3", changed("qwen3", O_PROJ, shape=shape))
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("; keep its role or choose another recipe")


def test_a_shape_that_is_kept_may_be_anything() -> None:
    build("mxfp8", "qwen3", changed("qwen3", "lm_head.weight", shape=(7, 13)))
    build("fp8_block", "qwen3", changed("qwen3", O_PROJ, shape=(130, 200)))  # ragged FP8 blocks are fine


def test_quantized_sources() -> None:
    """A quantized tensor is dequantized where the contract keeps it and refused where it would be requantized."""
    stored = get_format("mxfp8").options.parse({})
    index = list(changed("qwen3", O_PROJ, stored=stored, dtype="F8_E4M3"))
    with pytest.raises(PlanError, match=rf"'{re.escape(O_PROJ)}' is already mxfp8; .* with --recipe bf16 first"):
        build("mxfp8", "qwen3", index)
    step = steps_of(build("mxfp8", "qwen3", index, "policy.first=1"))[O_PROJ]
    assert (step.action, step.dtype) == (Action.DEQUANTIZE, "BF16")
    assert step.reason == "policy.first: 1 of 3 layers; stored as mxfp8"
    step = steps_of(build("bf16", "qwen3", index, "dtype=float32"))[O_PROJ]
    assert (step.action, step.dtype, step.weight) == (Action.DEQUANTIZE, "F32", None)
    assert step.reason == "no rule matches; stored as mxfp8"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "F64"])
def test_a_dtype_that_cannot_be_quantized(dtype: str) -> None:
    with pytest.raises(PlanError, match=rf"is {dtype}; only BF16, F16 and F32 weights can be quantized"):
        build("mxfp8", "qwen3", changed("qwen3", O_PROJ, dtype=dtype))


def test_a_tensor_without_a_role() -> None:
    extra = sample.source("model.layers.0.mlp.gate_up_proj.weight", (1024, 256))
    with pytest.raises(PlanError, match=r"'model\.layers\.0\.mlp\.gate_up_proj\.weight' has no role in family 'llama'"):
        build("mxfp8", "qwen3", [*sample.sources("qwen3"), extra])


def test_a_tensor_twice() -> None:
    with pytest.raises(PlanError, match=r"tensor 'lm_head\.weight' occurs twice in the source"):
        build("mxfp8", "qwen3", [*sample.sources("qwen3"), sample.source("lm_head.weight", (1, 1))])


def test_nothing_to_do() -> None:
    with pytest.raises(PlanError, match=r"nothing would be quantized: .* see policy\.last"):
        build("mxfp8", "qwen3", sample.sources("qwen3"), "policy.last=100%")
    assert quantized(build("bf16", "qwen3", sample.sources("qwen3"))) == set()


def test_bytes() -> None:
    parts = {
        "weight": TensorInfo(name="a.weight", dtype="F8_E4M3", shape=(3, 5)),
        "weight_scale_inv": TensorInfo(name="a.weight_scale_inv", dtype="F32", shape=(1, 1)),
    }
    assert SourceTensor(name="a.weight", dtype="F8_E4M3", shape=(3, 5), parts=parts).nbytes == 19
    assert TensorInfo(name="x", dtype="BF16", shape=()).nbytes == 2
    assert TensorInfo(name="x", dtype="F32", shape=(0, 3)).nbytes == 0
    assert DTYPE_BYTES["F8_E8M0"] == 1


# ---- size -----------------------------------------------------------------------------------------------

K2 = {"num_hidden_layers": 61, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}


def kimi_k2(experts: int) -> list[SourceTensor]:
    """The header list of Kimi-K2: 61 layers of up to 384 experts, 70 thousand tensors."""
    hidden, found = 7168, [sample.source("model.norm.weight", (7168,))]
    found += [sample.source(name, (163840, hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    attention = {"q_a_proj": (1536, hidden), "q_b_proj": (12288, 1536), "kv_a_proj_with_mqa": (576, hidden)}
    attention |= {"kv_b_proj": (16384, 512), "o_proj": (hidden, 8192)}
    for layer in range(61):
        prefix = f"model.layers.{layer}."
        found += [sample.source(f"{prefix}self_attn.{name}.weight", shape) for name, shape in attention.items()]
        found += [sample.source(f"{prefix}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]
        if layer:
            found.append(sample.source(f"{prefix}mlp.gate.weight", (experts, hidden)))
            found.append(sample.source(f"{prefix}mlp.gate.e_score_correction_bias", (experts,), "F32"))
        mlps = [f"experts.{expert}." for expert in range(experts)] + ["shared_experts."] if layer else [""]
        for mlp in mlps:
            found += [sample.source(f"{prefix}mlp.{mlp}{name}_proj.weight", (2048, hidden)) for name in ("gate", "up")]
            found.append(sample.source(f"{prefix}mlp.{mlp}down_proj.weight", (hidden, 2048)))
    return found


def build_kimi_k2(index: Sequence[SourceTensor], experts: int) -> Plan:
    family = find_family("kimi_k2")
    config = {"model_type": "kimi_k2", "n_routed_experts": experts, **K2}
    model = family.model(config, [item.name for item in index])
    return build_plan(resolve(load_recipe("nvfp4"), model), family, index)


def test_a_model_of_kimi_k2_size_takes_seconds() -> None:
    index = kimi_k2(384)
    began = time.process_time()
    plan = build_kimi_k2(index, 384)
    seconds = time.process_time() - began
    assert len(plan.steps) == len(index) == 69_853
    assert sum(bool(step.partners) for step in plan.steps) == 52 * 2 + 2 + 51 * 385 * 2
    assert seconds < 20  # 3 on an ordinary machine; any quadratic step takes hours


def test_work_grows_with_the_tensors() -> None:
    """Counted in function calls, so that a busy machine cannot fail it."""

    def calls(experts: int) -> int:
        index, count = kimi_k2(experts), 0

        def profile(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        try:
            build_kimi_k2(index, experts)
        finally:
            sys.setprofile(None)
        return count

    build_kimi_k2(kimi_k2(1), 1)  # imports and caches
    small, large = calls(4), calls(16)
    tensors = len(kimi_k2(16)) / len(kimi_k2(4))
    assert large / small < 1.1 * tensors
