"""DeepSeek-V3 and Kimi-K2: latent attention, routed and shared experts, dense first layers, MTP layers at the end.

An MTP layer has the names of a decoder layer, with an index that counts on from theirs, and its glue beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowprec.converters.family import Family

from .llama import BLOCK, EXPERTS, MLP, OUTER

LATENT_ATTENTION = {
    "model.layers.{layer}.self_attn.q_proj.weight": "attention.q",  # where q_lora_rank is null
    "model.layers.{layer}.self_attn.q_a_proj.weight": "mla.q_down",
    "model.layers.{layer}.self_attn.q_a_proj.bias": "bias",
    "model.layers.{layer}.self_attn.q_a_layernorm.weight": "norm",
    "model.layers.{layer}.self_attn.q_b_proj.weight": "mla.q_up",
    "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight": "mla.kv_down",
    "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.bias": "bias",
    "model.layers.{layer}.self_attn.kv_a_layernorm.weight": "norm",
    "model.layers.{layer}.self_attn.kv_b_proj.weight": "mla.kv_up",
}
SHARED_EXPERTS = {
    "model.layers.{layer}.mlp.gate.e_score_correction_bias": "router.bias",
    "model.layers.{layer}.mlp.shared_experts.gate_proj.weight": "shared_experts.gate",
    "model.layers.{layer}.mlp.shared_experts.up_proj.weight": "shared_experts.up",
    "model.layers.{layer}.mlp.shared_experts.down_proj.weight": "shared_experts.down",
}
MTP = {
    "model.layers.{layer}.eh_proj.weight": "mtp.proj",
    "model.layers.{layer}.enorm.weight": "mtp.norm",
    "model.layers.{layer}.hnorm.weight": "mtp.norm",
    "model.layers.{layer}.embed_tokens.weight": "mtp.embedding",
    "model.layers.{layer}.shared_head.norm.weight": "mtp.norm",
    "model.layers.{layer}.shared_head.head.weight": "mtp.head",
}


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """As DeepSeek-V3's own modeling code decides it; MTP layers follow the same rule."""
    freq = config.get("moe_layer_freq", 1)
    return layer >= (config.get("first_k_dense_replace") or 0) and layer % freq == 0


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    templates={**OUTER, **BLOCK, **LATENT_ATTENTION, **MLP, **EXPERTS, **SHARED_EXPERTS, **MTP},
    mtp_layers_key="num_nextn_predict_layers",
    experts_keys=("n_routed_experts", "num_local_experts"),
    is_sparse=is_sparse,
)
