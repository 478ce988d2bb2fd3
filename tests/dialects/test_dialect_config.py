"""The configs that are written: golden text, and that we read them back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_plans import SCHEMES, Scheme, dialect_of, make_plan

from lowprec.dialects import detect, get_dialect
from lowprec.errors import PlanError
from lowprec.formats.base import Options
from lowprec.formats.fp8_block import Fp8BlockOptions, Scale
from lowprec.formats.int4_group import Int4GroupOptions
from lowprec.formats.mxfp4 import Mxfp4Options
from lowprec.formats.mxfp8 import Mxfp8Options
from lowprec.plan import Plan

IGNORE = ("lm_head", "model.layers.2.mlp.gate")

FP8 = """
{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
 "modules_to_not_convert": ["lm_head", "model.layers.2.mlp.gate"]}
"""
FP8_UE8M0 = """
{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
 "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head", "model.layers.2.mlp.gate"]}
"""
MXFP8 = """
{"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
 "modules_to_not_convert": ["lm_head", "model.layers.2.mlp.gate"]}
"""
MXFP8_VLLM = """
{"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
 "ignored_layers": ["lm_head", "model.layers.2.mlp.gate"],
 "modules_to_not_convert": ["lm_head", "model.layers.2.mlp.gate"]}
"""
NVFP4 = """
{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
 "ignore": ["lm_head", "model.layers.2.mlp.gate"]}
"""
NVFP4_FILE = """
{"producer": {"name": "modelopt"},
 "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16,
                  "exclude_modules": ["lm_head", "model.layers.2.mlp.gate"]}}
"""
MXFP4 = """
{"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
 "config_groups": {"group_0": {
   "targets": ["Linear"],
   "weights": {"num_bits": 4, "type": "float", "symmetric": true, "strategy": "group", "group_size": 32,
               "dynamic": false, "scale_dtype": "torch.uint8"},
   "input_activations": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "group", "dynamic": true,
                         "group_size": 32, "scale_dtype": "torch.uint8"},
   "output_activations": null,
   "format": "mxfp4-pack-quantized"}},
 "ignore": ["lm_head", "model.layers.2.mlp.gate"]}
"""
INT4 = """
{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
 "config_groups": {"group_0": {
   "targets": ["Linear"],
   "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
               "dynamic": false},
   "input_activations": null,
   "output_activations": null,
   "format": "pack-quantized"}},
 "ignore": ["lm_head", "model.layers.2.mlp.gate"]}
"""
GOLDEN: list[tuple[str, str, dict[str, str]]] = [
    ("fp8_block", FP8, {}),
    ("fp8_block_mtp_kept", FP8_UE8M0, {}),
    ("mxfp8", MXFP8, {}),
    ("mxfp8_vllm", MXFP8_VLLM, {}),
    ("nvfp4", NVFP4, {"hf_quant_config.json": NVFP4_FILE}),
    ("mxfp4_mxfp8", MXFP4, {}),
    ("int4_experts", INT4, {}),
]


def plan_of(name: str) -> Plan:
    return make_plan("qwen3_moe", SCHEMES[name], layers=3, first=0, last=1)


@pytest.mark.parametrize(("name", "text", "files"), GOLDEN, ids=str)
def test_golden_config(name: str, text: str, files: dict[str, str]) -> None:
    section, extra = dialect_of(SCHEMES[name]).config(plan_of(name), IGNORE)
    expected = json.loads(text)
    assert json.dumps(section) == json.dumps(expected), "keys in this order"
    assert dict(extra) == {file: json.loads(content) for file, content in files.items()}


@pytest.mark.parametrize("name", list(SCHEMES))
def test_what_is_written_is_recognized_and_read_with_its_options(name: str) -> None:
    scheme = SCHEMES[name]
    dialect = dialect_of(scheme)
    plan = plan_of(name)
    section, extra = dialect.config(plan, IGNORE)
    sources: list[dict[str, Any]] = [{"quantization_config": section}]
    sources += [{"hf_quant_config": content} for content in extra.values()]
    step = next(step for step in plan.steps if step.weight is not None)
    infos = {info.name: info for info in dialect.infos(step.tensor.name, scheme.weight, step.source.shape)}
    for config in sources:
        assert detect(config).name == dialect.name
        (source,) = dialect.logical(config, infos)
        assert source.stored is not None
        assert (source.name, source.shape) == (step.tensor.name, step.source.shape)
        # What the bytes cannot tell is the default; what the config states is what was written.
        stated, read = scheme.weight.to_json(), source.stored.to_json()
        assert {key: read[key] for key in ("format", "block", "group", "scale") if key in read} == {
            key: stated[key] for key in ("format", "block", "group", "scale") if key in stated
        }


def test_no_kv_cache_scheme_is_ever_written() -> None:
    for name, scheme in SCHEMES.items():
        section, extra = dialect_of(scheme).config(plan_of(name), ())
        for content in (section, *extra.values()):
            text = json.dumps(content)
            assert "kv_cache_scheme" not in text
            assert text.count("kv_cache") == text.count('"kv_cache_quant_algo": null')


def changed(name: str, **fields: Any) -> Scheme:
    return Scheme(**{**vars(SCHEMES[name]), **fields})


REFUSED: list[tuple[str, Options, Options | None, str]] = [
    ("int4_experts", Int4GroupOptions(), Mxfp8Options(), "go with unquantized activations"),
    ("mxfp4_mxfp8", Mxfp4Options(), Fp8BlockOptions(), "cannot state activations in"),
    ("fp8_block", Mxfp8Options(), None, "no spelling for mxfp8"),
    ("nvfp4", Mxfp4Options(), None, "no spelling for mxfp4"),
    ("mxfp8", Fp8BlockOptions(), None, "no spelling for fp8_block"),
]


@pytest.mark.parametrize(("name", "weight", "activation", "message"), REFUSED, ids=str)
def test_what_the_config_cannot_say(name: str, weight: Options, activation: Options | None, message: str) -> None:
    scheme = changed(name, weight=weight, activation=activation)
    plan = make_plan("qwen3_moe", scheme, layers=3, first=0, last=1)
    with pytest.raises(PlanError, match=message):
        dialect_of(scheme).config(plan, ())


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (None, None),
        (Mxfp4Options(), {"num_bits": 4, "group_size": 32}),
        (Mxfp8Options(), {"num_bits": 8, "group_size": 32}),
        (Fp8BlockOptions(block=(1, 128)), {"num_bits": 8, "group_size": 128}),
    ],
    ids=str,
)
def test_activations_of_compressed_tensors(activation: Options | None, expected: dict[str, int] | None) -> None:
    scheme = changed("mxfp4_mxfp8", activation=activation)
    section, _ = dialect_of(scheme).config(make_plan("qwen3_moe", scheme, layers=3, first=0, last=1), ())
    assert section is not None
    found = section["config_groups"]["group_0"]["input_activations"]
    assert (found is None) == (expected is None)
    assert expected is None or expected.items() <= found.items()


def test_one_format_for_the_whole_checkpoint() -> None:
    plan = plan_of("fp8_block")
    scheme = changed("fp8_block", weight=Fp8BlockOptions(scale=Scale.POW2))
    other = make_plan("qwen3_moe", scheme, layers=3, first=0, last=1)
    steps = tuple(pair[index % 2] for index, pair in enumerate(zip(plan.steps, other.steps, strict=True)))
    with pytest.raises(PlanError, match=r"have different formats or options; a deepseek_fp8 checkpoint states one"):
        get_dialect("deepseek_fp8").config(Plan(contract=plan.contract, steps=steps), ())


def test_bf16_has_no_config() -> None:
    plan = plan_of("fp8_block")
    kept = Plan(contract=plan.contract, steps=tuple(step for step in plan.steps if step.weight is None))
    assert get_dialect("bf16").config(kept, ()) == (None, {})
    with pytest.raises(PlanError, match="would be quantized; a bf16 checkpoint cannot say so"):
        get_dialect("bf16").config(plan, ())
    with pytest.raises(PlanError, match="no place for an ignore list"):
        get_dialect("bf16").config(kept, ("lm_head",))
    with pytest.raises(PlanError, match="nothing is quantized"):
        get_dialect("deepseek_fp8").config(kept, ())
