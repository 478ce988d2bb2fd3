"""Qwen3-MoE: Qwen3's attention, routed experts without shared ones, dense MLPs where the config says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowprec.converters.family import Family

from .llama import ATTENTION, BLOCK, EXPERTS, MLP, OUTER


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """As transformers decides it (models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeDecoderLayer)."""
    step = config.get("decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    templates={**OUTER, **BLOCK, **ATTENTION, **MLP, **EXPERTS},
    # The published checkpoints say num_experts, transformers 5 writes num_local_experts.
    experts_keys=("num_experts", "num_local_experts"),
    is_sparse=is_sparse,
)
