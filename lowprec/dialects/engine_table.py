"""What each serving engine builds and how it reads ignore lists, as data.

Versions and facts: sglang 0.5.23, vllm 0.33.0, transformers 5.24 (spec/serving.md 1, 2), read from their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import PlanError, did_you_mean
from . import matching
from .matching import Packed, Rule

_QKV = MappingProxyType({"qkv_proj": ("q_proj", "k_proj", "v_proj")})
_GATE_UP = MappingProxyType({"gate_up_proj": ("gate_proj", "up_proj")})
_DEEPSEEK = ("deepseek_v3", "kimi_k2")
_FP8_KEYS = ("ignored_layers", "modules_to_not_convert")
_NO_PACKED: Packed = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Method:
    """How an engine reads the ignore list of one quant_method.

    keys: where it looks; the first that is there and not empty. linears, experts: the rule for linears and for the
    container of a layer's routed experts. lm_head: whether it quantizes the output head unless that is ignored.
    mtp: whether it quantizes MTP layers at all. any_layer_tails: last words of an entry that hit other layers too.
    """

    keys: tuple[str, ...]
    linears: Rule
    experts: Rule
    lm_head: bool = False
    mtp: bool = True
    any_layer_tails: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One serving engine.

    fused: roles that it builds as one matrix -> last word of that module. packed: model_type -> packed_modules_mapping
    of its model class ("" for every other one). mtp: what stands for `model.layers.<i>` in an MTP layer's modules, with
    `{layer}`; None: it does not build them. mtp_head: path of an MTP layer's output head. linear_routers: whether the
    router of a model_type that is not in `plain_routers` is a linear that the quant_method may take.
    """

    name: str
    version: str
    methods: Mapping[str, Method]
    fused: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    packed: Mapping[str, Packed] = field(default_factory=dict)
    mtp: str | None = None
    mtp_head: str | None = None
    linear_routers: bool = False
    plain_routers: tuple[str, ...] = ()

    def packed_for(self, model_type: str) -> Packed:
        """The packed_modules_mapping of a model class."""
        return self.packed.get(model_type, self.packed.get("", _NO_PACKED))

    def router_is_linear(self, model_type: str) -> bool:
        """Whether the router can be quantized by mistake."""
        return self.linear_routers and model_type not in self.plain_routers


def _fused(latent: str) -> Mapping[tuple[str, ...], str]:
    return MappingProxyType(
        {
            ("attention.q", "attention.k", "attention.v"): "qkv_proj",
            ("mla.q_down", "mla.kv_down"): latent,
            ("mlp.gate", "mlp.up"): "gate_up_proj",
            ("shared_experts.gate", "shared_experts.up"): "gate_up_proj",
        }
    )


_SGLANG_FP8 = Method(keys=_FP8_KEYS, linears=matching.sglang_fp8, experts=matching.sglang_fp8)
_VLLM_MXFP8 = Method(
    keys=("ignored_layers",), linears=matching.vllm_modelopt, experts=matching.vllm_modelopt, lm_head=True
)
_TRANSFORMERS_FP8 = Method(
    keys=("modules_to_not_convert", "ignored_layers"),
    linears=matching.transformers_fp8,
    experts=matching.transformers_fp8,
    lm_head=True,
)
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")

_SGLANG = Engine(
    name="sglang",
    version="0.5.23",
    fused=_fused("fused_qkv_a_proj_with_mqa"),
    # Dense Llama, Qwen2 and Qwen3 classes have no mapping; the fp8 methods bring their own.
    packed=MappingProxyType(
        {
            "qwen3_moe": MappingProxyType({**_QKV, **_GATE_UP}),
            **dict.fromkeys(_DEEPSEEK, MappingProxyType({"fused_qkv_a_proj_with_mqa": _LATENT})),
        }
    ),
    mtp="model.decoder",
    mtp_head="model.shared_head.head",
    methods=MappingProxyType(
        {
            "fp8": _SGLANG_FP8,
            "mxfp8": _SGLANG_FP8,
            "modelopt": Method(
                keys=("ignore", "modules_to_not_convert", "exclude_modules"),
                linears=matching.sglang_modelopt,
                experts=matching.sglang_modelopt_experts,
                lm_head=True,
                mtp=False,
                any_layer_tails=matching.SGLANG_MODELOPT_TAILS,
            ),
            "compressed-tensors": Method(
                keys=("ignore",),
                linears=matching.sglang_compressed_tensors,
                experts=matching.sglang_compressed_tensors_experts,
            ),
        }
    ),
)

_VLLM = Engine(
    name="vllm",
    version="0.33.0",
    fused=_fused("fused_qkv_a_proj"),
    packed=MappingProxyType(
        {
            "": MappingProxyType({**_QKV, **_GATE_UP}),
            **dict.fromkeys(_DEEPSEEK, MappingProxyType({**_GATE_UP, "fused_qkv_a_proj": _LATENT})),
        }
    ),
    mtp="model.layers.{layer}",
    mtp_head="model.layers.{layer}.head",
    linear_routers=True,
    plain_routers=_DEEPSEEK,
    methods=MappingProxyType(
        {
            "fp8": Method(keys=_FP8_KEYS, linears=matching.vllm_fp8, experts=matching.vllm_fp8),
            "mxfp8": _VLLM_MXFP8,
            "modelopt": Method(
                keys=("ignore",), linears=matching.vllm_modelopt, experts=matching.vllm_modelopt, lm_head=True
            ),
            "compressed-tensors": Method(
                keys=("ignore",),
                linears=matching.vllm_compressed_tensors,
                experts=matching.vllm_compressed_tensors_experts,
            ),
        }
    ),
)

_TRANSFORMERS = Engine(
    name="transformers",
    version="5.24.0",
    methods=MappingProxyType(
        {
            "fp8": _TRANSFORMERS_FP8,
            "mxfp8": _TRANSFORMERS_FP8,
            "compressed-tensors": Method(
                keys=("ignore",), linears=matching.exact_or_regex, experts=matching.exact_or_regex, lm_head=True
            ),
        }
    ),
)

ENGINES: Mapping[str, Engine] = MappingProxyType({engine.name: engine for engine in (_SGLANG, _VLLM, _TRANSFORMERS)})


def get_engine(name: str) -> Engine:
    """The engine called `name`. Raises PlanError for one that is not in the table."""
    if name not in ENGINES:
        raise PlanError(f"unknown engine '{name}'{did_you_mean(name, ENGINES)}")
    return ENGINES[name]
