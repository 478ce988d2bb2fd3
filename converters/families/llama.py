"""Dense decoders with the names of Llama: Llama, Qwen2 (biases on q, k, v), Qwen3 (q and k norms)."""

from __future__ import annotations

from lowprec.converters.family import Family

OUTER = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head",
    "model.rotary_emb.inv_freq": "rotary",
}
BLOCK = {
    "model.layers.{layer}.input_layernorm.weight": "norm",
    "model.layers.{layer}.post_attention_layernorm.weight": "norm",
    "model.layers.{layer}.self_attn.o_proj.weight": "attention.o",
    "model.layers.{layer}.self_attn.o_proj.bias": "bias",
    "model.layers.{layer}.self_attn.rotary_emb.inv_freq": "rotary",
}
ATTENTION = {
    "model.layers.{layer}.self_attn.q_proj.weight": "attention.q",
    "model.layers.{layer}.self_attn.k_proj.weight": "attention.k",
    "model.layers.{layer}.self_attn.v_proj.weight": "attention.v",
    "model.layers.{layer}.self_attn.q_proj.bias": "bias",
    "model.layers.{layer}.self_attn.k_proj.bias": "bias",
    "model.layers.{layer}.self_attn.v_proj.bias": "bias",
    "model.layers.{layer}.self_attn.q_norm.weight": "norm",
    "model.layers.{layer}.self_attn.k_norm.weight": "norm",
}
MLP = {
    "model.layers.{layer}.mlp.gate_proj.weight": "mlp.gate",
    "model.layers.{layer}.mlp.up_proj.weight": "mlp.up",
    "model.layers.{layer}.mlp.down_proj.weight": "mlp.down",
    "model.layers.{layer}.mlp.gate_proj.bias": "bias",
    "model.layers.{layer}.mlp.up_proj.bias": "bias",
    "model.layers.{layer}.mlp.down_proj.bias": "bias",
}
EXPERTS = {
    "model.layers.{layer}.mlp.gate.weight": "router",
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": "experts.gate",
    "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": "experts.up",
    "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": "experts.down",
}

FAMILY = Family(
    name="llama",
    model_types=("llama", "qwen2", "qwen3"),
    templates={**OUTER, **BLOCK, **ATTENTION, **MLP},
)
