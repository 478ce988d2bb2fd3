"""The vocabulary of roles: what a tensor is for, whatever a model family calls it.

A family maps every tensor name to one of these; recipes select by them.
"""

from __future__ import annotations

from types import MappingProxyType

# Matrices that an engine can serve in low precision.
LINEAR_ROLES = MappingProxyType(
    {
        "attention.q": "query projection",
        "attention.k": "key projection",
        "attention.v": "value projection",
        "attention.o": "output projection of the attention, MLA included",
        "mla.q_down": "MLA: hidden to query latent (q_a_proj)",
        "mla.q_up": "MLA: query latent to heads (q_b_proj)",
        "mla.kv_down": "MLA: hidden to key-value latent and rope key (kv_a_proj_with_mqa)",
        "mla.kv_up": "MLA: key-value latent to heads (kv_b_proj), absorbed into the attention by engines",
        "mla.k_up": "MLA: the key half of kv_up where a trainer stores it apart",
        "mla.v_up": "MLA: the value half of kv_up where a trainer stores it apart",
        "mlp.gate": "gate projection of a dense MLP",
        "mlp.up": "up projection of a dense MLP",
        "mlp.down": "down projection of a dense MLP",
        "experts.gate": "gate projection of a routed expert",
        "experts.up": "up projection of a routed expert",
        "experts.down": "down projection of a routed expert",
        "shared_experts.gate": "gate projection of the shared experts",
        "shared_experts.up": "up projection of the shared experts",
        "shared_experts.down": "down projection of the shared experts",
    }
)

# Everything else; no recipe of ours quantizes these, and a rule that names one is an error.
KEPT_ROLES = MappingProxyType(
    {
        "embedding": "token embedding",
        "lm_head": "output head",
        "norm": "layer norms, q and k norms, latent norms",
        "rotary": "rotary frequencies: a buffer that engines compute themselves and old checkpoints store",
        "bias": "bias of a linear",
        "router": "router of a mixture of experts",
        "router.bias": "bias or score correction of a router",
        "shared_experts.router": "gate of the shared expert (shared_expert_gate)",
        "mtp.proj": "MTP: projection of embedding and hidden state (eh_proj)",
        "mtp.norm": "MTP: enorm, hnorm and the norm of the shared head",
        "mtp.embedding": "MTP: copy of the token embedding",
        "mtp.head": "MTP: copy of the output head",
        "vision": "vision tower and multimodal projector",
    }
)

ROLES = MappingProxyType({**LINEAR_ROLES, **KEPT_ROLES})

# Roles that engines serve as one fused matrix. Where a format has a global scale they share one amax
# (spec: NVFP4 gate/up and q/k/v; DeepSeek fuses q_a_proj with kv_a_proj_with_mqa).
PARTNERS = (
    ("attention.q", "attention.k", "attention.v"),
    ("mla.q_down", "mla.kv_down"),
    ("mlp.gate", "mlp.up"),
    ("experts.gate", "experts.up"),
    ("shared_experts.gate", "shared_experts.up"),
)
