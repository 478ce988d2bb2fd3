"""Plans for tests: names and shapes of small models, and one rule set for each dialect. No values, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowprec.contract import Contract, Model, resolve
from lowprec.converters.family import Family, find_family
from lowprec.dialects import get_dialect
from lowprec.dialects.base import Dialect
from lowprec.formats.base import Options, Shape
from lowprec.formats.fp8_block import Fp8BlockOptions, Scale
from lowprec.formats.int4_group import Int4GroupOptions
from lowprec.formats.mxfp4 import Mxfp4Options
from lowprec.formats.mxfp8 import Mxfp8Options
from lowprec.formats.nvfp4 import Nvfp4Options, Outer
from lowprec.plan import Plan, SourceTensor, TensorInfo, build_plan
from lowprec.recipe import Backward, Mtp, Policy, Recipe, Rule, Selector
from lowprec.roles import LINEAR_ROLES

KINDS = ("qwen3", "llama", "qwen3_moe", "deepseek_v3", "kimi_k2", "deepseek_v3_no_q_lora")
HIDDEN, INTER, EXPERT_INTER, Q_LORA, KV_LORA, ROPE = 256, 512, 128, 128, 128, 128
EXPERT_ROLES = ("experts.gate", "experts.up", "experts.down")
SHARED_ROLES = ("shared_experts.gate", "shared_experts.up", "shared_experts.down")
MLA_UP = ("mla.kv_up", "mla.k_up", "mla.v_up")


def shapes(kind: str, layers: int, experts: int = 2, mtp: int = 1) -> dict[str, Shape]:
    """Name -> shape of every tensor of a small model, all multiples of 128 where an engine wants them to be."""
    deepseek = kind.startswith(("deepseek", "kimi"))
    total = layers + (mtp if kind.startswith("deepseek") else 0)
    found: dict[str, Shape] = {
        "model.embed_tokens.weight": (512, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (512, HIDDEN),
    }
    for layer in range(total):
        prefix = f"model.layers.{layer}"
        below = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        below |= _latent_attention("no_q_lora" not in kind) if deepseek else _attention(kind)
        sparse = kind == "qwen3_moe" or (deepseek and layer > 0)
        below |= _experts(experts, shared=deepseek) if sparse else _mlp("mlp", INTER)
        if layer >= layers:
            below |= _mtp_glue()
        found |= {f"{prefix}.{name}.weight": shape for name, shape in below.items()}
        if deepseek and sparse:
            found[f"{prefix}.mlp.gate.e_score_correction_bias"] = (experts,)
    return found


def _attention(kind: str) -> dict[str, Shape]:
    norms: dict[str, Shape] = {f"self_attn.{x}_norm": (64,) for x in "qk"} if kind.startswith("qwen3") else {}
    return norms | {
        "self_attn.q_proj": (256, HIDDEN),
        "self_attn.k_proj": (128, HIDDEN),
        "self_attn.v_proj": (128, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 256),
    }


def _latent_attention(q_lora: bool) -> dict[str, Shape]:
    query: dict[str, Shape] = {"self_attn.q_proj": (384, HIDDEN)}
    if q_lora:
        query = {
            "self_attn.q_a_proj": (Q_LORA, HIDDEN),
            "self_attn.q_a_layernorm": (Q_LORA,),
            "self_attn.q_b_proj": (384, Q_LORA),
        }
    return query | {
        "self_attn.kv_a_proj_with_mqa": (KV_LORA + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm": (KV_LORA,),
        "self_attn.kv_b_proj": (512, KV_LORA),
        "self_attn.o_proj": (HIDDEN, 256),
    }


def _mlp(prefix: str, inter: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj": (inter, HIDDEN),
        f"{prefix}.up_proj": (inter, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, inter),
    }


def _experts(count: int, shared: bool) -> dict[str, Shape]:
    found: dict[str, Shape] = {"mlp.gate": (count, HIDDEN)}
    for expert in range(count):
        found |= _mlp(f"mlp.experts.{expert}", EXPERT_INTER)
    return found | (_mlp("mlp.shared_experts", EXPERT_INTER) if shared else {})


def _mtp_glue() -> dict[str, Shape]:
    return {
        "embed_tokens": (512, HIDDEN),
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "shared_head.norm": (HIDDEN,),
        "shared_head.head": (512, HIDDEN),
    }


def config(kind: str, layers: int, experts: int = 2, mtp: int = 1) -> dict[str, Any]:
    """The part of config.json that a family reads."""
    model_type = "deepseek_v3" if kind.startswith("deepseek") else kind
    found: dict[str, Any] = {"model_type": model_type, "num_hidden_layers": layers}
    if model_type in ("deepseek_v3", "kimi_k2"):
        found |= {"n_routed_experts": experts, "first_k_dense_replace": 1}
        found |= {"num_nextn_predict_layers": mtp if model_type == "deepseek_v3" else 0}
    if model_type == "qwen3_moe":
        found |= {"num_experts": experts}
    return found


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to quantize: what a recipe of ours would say."""

    dialect: str
    weight: Options
    activation: Options | None
    roles: tuple[str, ...] = tuple(LINEAR_ROLES)
    engines: tuple[str, ...]
    mtp: Mtp
    keep: tuple[str, ...] = ()


_FP8_ACTIVATION = Fp8BlockOptions(block=(1, 128))
SCHEMES: Mapping[str, Scheme] = {
    "fp8_block": Scheme(
        dialect="deepseek_fp8",
        weight=Fp8BlockOptions(),
        activation=_FP8_ACTIVATION,
        engines=("sglang", "vllm", "transformers"),
        mtp=Mtp.QUANTIZE,
    ),
    "fp8_block_mtp_kept": Scheme(
        dialect="deepseek_fp8",
        weight=Fp8BlockOptions(scale=Scale.POW2),
        activation=Fp8BlockOptions(scale=Scale.POW2, block=(1, 128)),
        engines=("sglang", "vllm", "transformers"),
        mtp=Mtp.KEEP,
    ),
    "mxfp8": Scheme(
        dialect="sglang_mxfp8",
        weight=Mxfp8Options(),
        activation=Mxfp8Options(),
        engines=("sglang", "transformers"),
        mtp=Mtp.QUANTIZE,
        keep=MLA_UP,
    ),
    "mxfp8_vllm": Scheme(
        dialect="vllm_mxfp8",
        weight=Mxfp8Options(),
        activation=Mxfp8Options(),
        engines=("sglang", "vllm"),
        mtp=Mtp.QUANTIZE,
        keep=MLA_UP,
    ),
    "nvfp4": Scheme(
        dialect="modelopt_nvfp4",
        weight=Nvfp4Options(),
        activation=Nvfp4Options(outer=Outer.ROW),
        engines=("sglang", "vllm"),
        mtp=Mtp.KEEP,
        keep=MLA_UP,
    ),
    "nvfp4_experts": Scheme(
        dialect="modelopt_nvfp4",
        weight=Nvfp4Options(),
        activation=Nvfp4Options(outer=Outer.ROW),
        roles=EXPERT_ROLES + SHARED_ROLES,
        engines=("sglang", "vllm"),
        mtp=Mtp.KEEP,
    ),
    "mxfp4_mxfp8": Scheme(
        dialect="compressed_tensors",
        weight=Mxfp4Options(),
        activation=Mxfp8Options(),
        roles=EXPERT_ROLES,
        engines=("vllm",),
        mtp=Mtp.KEEP,
    ),
    "mxfp4_dense": Scheme(
        dialect="compressed_tensors",
        weight=Mxfp4Options(),
        activation=Mxfp8Options(),
        engines=("vllm",),
        mtp=Mtp.KEEP,
        keep=MLA_UP,
    ),
    "int4_experts": Scheme(
        dialect="compressed_tensors",
        weight=Int4GroupOptions(),
        activation=None,
        roles=EXPERT_ROLES,
        engines=("sglang", "vllm"),
        mtp=Mtp.KEEP,
    ),
    "int4": Scheme(
        dialect="compressed_tensors",
        weight=Int4GroupOptions(),
        activation=None,
        engines=("sglang", "vllm"),
        mtp=Mtp.KEEP,
        keep=MLA_UP,
    ),
}


def make_plan(
    kind: str,
    scheme: Scheme,
    *,
    layers: int = 14,
    experts: int = 2,
    first: int = 2,
    last: int = 2,
    keep_names: tuple[str, ...] = (),
    sizes: Mapping[str, Shape] | None = None,
) -> Plan:
    """The plan of one scheme for one small model. Layer 1 is kept; 10 and 11, which begin with its number, are not."""
    kept = [Rule(selector=Selector(names=keep_names), weight=None, activation=None)] if keep_names else []
    quantize = Rule(selector=Selector(roles=scheme.roles), weight=scheme.weight, activation=scheme.activation)
    recipe = Recipe(
        name="test",
        description="",
        dialect=scheme.dialect,
        engines=scheme.engines,
        quantize_from="bfloat16",
        dtype="bfloat16",
        rules=(*kept, quantize),
        policy=Policy(first=first, last=last, mtp=scheme.mtp, keep=scheme.keep),
        backward=Backward.HIGH_PRECISION,
    )
    return plan_for(kind, recipe, layers=layers, experts=experts, sizes=sizes)


def plan_for(
    kind: str, recipe: Recipe, *, layers: int = 14, experts: int = 2, sizes: Mapping[str, Shape] | None = None
) -> Plan:
    """The plan of a recipe for one small model. Raises RecipeError if it does not fit."""
    found = dict(shapes(kind, layers, experts)) | dict(sizes or {})
    settings = config(kind, layers, experts)
    family: Family = find_family(str(settings["model_type"]))
    model: Model = family.model(settings, found)
    contract: Contract = resolve(recipe, model)
    index = [
        SourceTensor(
            name=name,
            dtype="BF16",
            shape=shape,
            parts={"weight": TensorInfo(name=name, dtype="BF16", shape=shape)},
        )
        for name, shape in found.items()
    ]
    return build_plan(contract, family, index)


def dialect_of(scheme: Scheme) -> Dialect:
    """The scheme's dialect."""
    return get_dialect(scheme.dialect)
