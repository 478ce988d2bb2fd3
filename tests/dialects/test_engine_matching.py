"""The engines' matching rules, row by row: what their own functions were seen to do."""

from __future__ import annotations

import pytest

from lowprec.dialects import matching
from lowprec.dialects.engine_table import ENGINES
from lowprec.dialects.matching import EngineRefusesError, IgnoreList, Rule

L0, L1, L3 = "model.layers.0", "model.layers.1", "model.layers.3"
QKV = [f"{L0}.self_attn.{x}_proj" for x in "qkv"]
GATE_UP = [f"{L0}.mlp.gate_proj", f"{L0}.mlp.up_proj"]
EXPERT_0 = [f"{L3}.mlp.experts.0.{x}_proj" for x in ("gate", "up", "down")]
Q_A = [f"{L3}.self_attn.q_a_proj", f"{L3}.self_attn.kv_a_proj_with_mqa"]
REFUSES = "refuses"

# rule, model_type, entries, module, whether the engine leaves it unquantized
ROWS: list[tuple[Rule, str, list[str], str, bool | str]] = [
    # SGLang fp8 and mxfp8: boundaries of words, with and without `model.`
    (matching.sglang_fp8, "qwen3", [f"{L0}.mlp.gate"], f"{L0}.mlp.gate_up_proj", False),
    (matching.sglang_fp8, "qwen3", ["mlp.gate"], f"{L0}.mlp.gate", True),
    (matching.sglang_fp8, "qwen3", [L0], f"{L0}.self_attn.o_proj", True),
    (matching.sglang_fp8, "qwen3", [f"{L0}."], f"{L0}.self_attn.o_proj", True),
    (matching.sglang_fp8, "qwen3", [L1], "model.layers.10.self_attn.o_proj", False),
    (matching.sglang_fp8, "qwen3", ["layers.0.self_attn.o_proj"], f"{L0}.self_attn.o_proj", True),
    (matching.sglang_fp8, "qwen3", [f"{L0}.self_attn.o_proj"], "layers.0.self_attn.o_proj", True),
    (matching.sglang_fp8, "qwen3", [f"{L0}.self_attn*"], f"{L0}.self_attn.o_proj", False),
    (matching.sglang_fp8, "qwen3", ["re:.*o_proj"], f"{L0}.self_attn.o_proj", False),
    (matching.sglang_fp8, "qwen3", QKV, f"{L0}.self_attn.qkv_proj", True),
    (matching.sglang_fp8, "qwen3", QKV[:2], f"{L0}.self_attn.qkv_proj", REFUSES),
    (matching.sglang_fp8, "qwen3", GATE_UP[1:], f"{L0}.mlp.gate_up_proj", REFUSES),
    (matching.sglang_fp8, "qwen3", [f"{L0}.self_attn.qkv_proj"], f"{L0}.self_attn.qkv_proj", False),
    (matching.sglang_fp8, "deepseek_v3", Q_A, f"{L3}.self_attn.fused_qkv_a_proj_with_mqa", True),
    (matching.sglang_fp8, "deepseek_v3", Q_A[:1], f"{L3}.self_attn.fused_qkv_a_proj_with_mqa", REFUSES),
    (matching.sglang_fp8, "qwen3_moe", [f"{L3}.mlp.experts.7.down_proj"], f"{L3}.mlp.experts", True),
    (matching.sglang_fp8, "qwen3_moe", ["layers.3.mlp.experts.7.down_proj"], f"{L3}.mlp.experts", True),
    (matching.sglang_fp8, "qwen3_moe", [f"{L3}.mlp.experts"], f"{L3}.mlp.experts", True),
    (matching.sglang_fp8, "qwen3_moe", [f"{L3}.mlp.gate"], f"{L3}.mlp.experts", False),
    # SGLang ModelOpt: as above or a glob; experts only by glob or full path; some tails hit every layer
    (matching.sglang_modelopt, "qwen3", [L3], f"{L3}.self_attn.o_proj", True),
    (matching.sglang_modelopt_experts, "qwen3_moe", [f"{L3}."], f"{L3}.mlp.experts", False),
    (matching.sglang_modelopt_experts, "qwen3_moe", [L3], f"{L3}.mlp.experts", False),
    (matching.sglang_modelopt_experts, "qwen3_moe", [f"{L3}.*"], f"{L3}.mlp.experts", True),
    (matching.sglang_modelopt_experts, "qwen3_moe", [f"{L3}.mlp.experts"], f"{L3}.mlp.experts", True),
    (matching.sglang_modelopt_experts, "qwen3_moe", EXPERT_0, f"{L3}.mlp.experts", False),
    (matching.sglang_modelopt_experts, "qwen3_moe", ["experts"], f"{L3}.mlp.experts", True),
    (matching.sglang_modelopt, "qwen3", ["lm_head"], "lm_head", True),
    (matching.sglang_modelopt, "qwen3", [], "lm_head", False),
    (matching.sglang_modelopt, "qwen3", ["layers.3.self_attn.o_proj"], f"{L3}.self_attn.o_proj", True),
    (matching.sglang_modelopt, "qwen3", ["*o_proj"], f"{L3}.self_attn.o_proj", True),
    (matching.sglang_modelopt, "deepseek_v3", [f"{L3}.self_attn.q_b_proj"], f"{L0}.self_attn.q_b_proj", True),
    (matching.sglang_modelopt, "deepseek_v3", [f"{L3}.self_attn.q_b_proj*"], f"{L0}.self_attn.q_b_proj", False),
    (matching.sglang_modelopt, "deepseek_v3", [f"{L3}.self_attn.q_b_proj*"], f"{L3}.self_attn.q_b_proj", True),
    (matching.sglang_modelopt, "deepseek_v3", Q_A, f"{L0}.self_attn.fused_qkv_a_proj_with_mqa", True),
    # SGLang compressed-tensors: exact, tail, `re:`; never a parent; fused only where the model class says so
    (matching.sglang_compressed_tensors, "qwen3", [L0], f"{L0}.self_attn.o_proj", False),
    (matching.sglang_compressed_tensors, "qwen3", ["self_attn.o_proj"], f"{L0}.self_attn.o_proj", True),
    (matching.sglang_compressed_tensors, "qwen3", ["attn.o_proj"], f"{L0}.self_attn.o_proj", False),
    (matching.sglang_compressed_tensors, "qwen3", ["re:.*self_attn"], f"{L0}.self_attn.o_proj", True),
    (matching.sglang_compressed_tensors, "qwen3", ["re:self_attn"], f"{L0}.self_attn.o_proj", False),
    (matching.sglang_compressed_tensors, "qwen3", QKV, f"{L0}.self_attn.qkv_proj", False),
    (matching.sglang_compressed_tensors, "qwen3", [f"{L0}.self_attn.qkv_proj"], f"{L0}.self_attn.qkv_proj", True),
    (matching.sglang_compressed_tensors, "qwen3_moe", QKV, f"{L0}.self_attn.qkv_proj", True),
    (matching.sglang_compressed_tensors, "qwen3_moe", QKV[:1], f"{L0}.self_attn.qkv_proj", REFUSES),
    (matching.sglang_compressed_tensors_experts, "qwen3_moe", EXPERT_0, f"{L3}.mlp.experts", True),
    (matching.sglang_compressed_tensors_experts, "qwen3_moe", EXPERT_0[:1], f"{L3}.mlp.experts", REFUSES),
    (matching.sglang_compressed_tensors_experts, "qwen3_moe", [f"{L3}.mlp.experts"], f"{L3}.mlp.experts", False),
    # vLLM fp8: the exact path
    (matching.vllm_fp8, "qwen3", [L0, f"{L1}."], f"{L0}.self_attn.o_proj", False),
    (matching.vllm_fp8, "qwen3", ["layers.0.self_attn.o_proj"], f"{L0}.self_attn.o_proj", False),
    (matching.vllm_fp8, "qwen3", [f"{L0}.self_attn.o_proj"], f"{L0}.self_attn.o_proj", True),
    (matching.vllm_fp8, "qwen3", QKV, f"{L0}.self_attn.qkv_proj", True),
    (matching.vllm_fp8, "qwen3", QKV[1:], f"{L0}.self_attn.qkv_proj", REFUSES),
    (matching.vllm_fp8, "qwen3", [f"{L0}.self_attn.qkv_proj"], f"{L0}.self_attn.qkv_proj", True),
    (matching.vllm_fp8, "qwen3_moe", [f"{L3}.mlp.experts.5.up_proj"], f"{L3}.mlp.experts", True),
    (matching.vllm_fp8, "qwen3_moe", [f"{L3}.mlp"], f"{L3}.mlp.experts", False),
    # vLLM ModelOpt and mxfp8: also substrings and shell patterns
    (matching.vllm_modelopt, "qwen3", ["mlp.gate"], f"{L0}.mlp.gate_up_proj", True),
    (matching.vllm_modelopt, "qwen3", [f"{L0}.mlp.gate"], f"{L0}.mlp.gate_up_proj", True),
    (matching.vllm_modelopt, "qwen3", [L1], "model.layers.10.self_attn.o_proj", True),
    (matching.vllm_modelopt, "qwen3", [f"{L1}."], "model.layers.10.self_attn.o_proj", False),
    (matching.vllm_modelopt, "qwen3", [f"{L3}.self_attn.q_b_proj*"], f"{L3}.self_attn.q_b_proj", True),
    (matching.vllm_modelopt, "qwen3", [f"{L3}.*"], f"{L3}.mlp.experts", True),
    (matching.vllm_modelopt, "qwen3", QKV[:2], f"{L0}.self_attn.qkv_proj", REFUSES),
    # vLLM compressed-tensors: exact or `re:`, fused by name or by all shards
    (matching.vllm_compressed_tensors, "qwen3", QKV, f"{L0}.self_attn.qkv_proj", True),
    (matching.vllm_compressed_tensors, "qwen3", QKV[2:], f"{L0}.self_attn.qkv_proj", REFUSES),
    (matching.vllm_compressed_tensors, "qwen3", ["self_attn.o_proj"], f"{L0}.self_attn.o_proj", False),
    (matching.vllm_compressed_tensors, "qwen3", [r"re:.*o_proj$"], f"{L0}.self_attn.o_proj", True),
    (matching.vllm_compressed_tensors_experts, "qwen3_moe", EXPERT_0, f"{L3}.mlp.experts", True),
    (matching.vllm_compressed_tensors_experts, "qwen3_moe", [f"{L3}.mlp.experts"], f"{L3}.mlp.experts", False),
    # transformers: a regular expression from the start up to a word's end, or a suffix
    (matching.transformers_fp8, "qwen3", [L1], f"{L1}.self_attn.o_proj", True),
    (matching.transformers_fp8, "qwen3", [L1], "model.layers.10.self_attn.o_proj", False),
    (matching.transformers_fp8, "qwen3", [f"{L0}.mlp.gate"], f"{L0}.mlp.gate_proj", False),
    (matching.transformers_fp8, "qwen3", ["model.layers.*.mlp"], f"{L0}.mlp.gate_proj", True),
    (matching.transformers_fp8, "qwen3", ["o_proj"], f"{L0}.self_attn.o_proj", True),
    (matching.transformers_fp8, "qwen3", ["gate"], f"{L0}.mlp.shared_expert_gate", True),
    (matching.transformers_fp8, "qwen3_moe", EXPERT_0, f"{L3}.mlp.experts", False),
    (matching.transformers_fp8, "qwen3", [], f"{L0}.self_attn.o_proj", False),
    (matching.exact_or_regex, "qwen3", QKV, QKV[0], True),
    (matching.exact_or_regex, "qwen3", [L0], QKV[0], False),
]


def engine_of(rule: Rule) -> str:
    name = getattr(rule, "__name__", "")
    return next((engine for engine in ENGINES if name.startswith(engine)), "transformers")


def word(value: object) -> str:
    """A value in a test's name: the same in every process, which a function's address is not."""
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(("rule", "model_type", "entries", "module", "expected"), ROWS, ids=word)
def test_rule(rule: Rule, model_type: str, entries: list[str], module: str, expected: bool | str) -> None:
    packed = ENGINES[engine_of(rule)].packed_for(model_type)
    try:
        found: bool | str = rule(IgnoreList(entries), module, packed)
    except EngineRefusesError:
        found = REFUSES
    assert found == expected


@pytest.mark.parametrize("rule", [matching.sglang_compressed_tensors, matching.transformers_fp8], ids=word)
def test_an_entry_that_is_no_regular_expression_stops_the_engine(rule: Rule) -> None:
    with pytest.raises(EngineRefusesError, match="no regular expression"):
        rule(IgnoreList(["re:(", "("]), f"{L0}.self_attn.o_proj", {})
