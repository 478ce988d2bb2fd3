"""transformers loads what we write on a CPU, and its weights equal our dequantized bfloat16 ones in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peer_checkpoints import converted, first_difference, our_values, quantized_sources, read_config, read_tensors
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear, replace_with_fp8_linear
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from lowprec.dialects.matching import IgnoreList, transformers_fp8
from lowprec.formats import get_format
from lowprec.formats.fp8_block import Fp8BlockOptions

CASES = [
    (kind, recipe)
    for kind in ("qwen3", "qwen3_moe", "deepseek_v3")
    for recipe in ("fp8_block", "fp8_block_ue8m0", "mxfp8")
]

MTP_LAYER = ".layers.3."  # after the three decoder layers; transformers does not build it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


def load(path: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True, **options)  # type: ignore[no-any-return]


def expected_parameters(values: dict[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    """Checkpoint weights as transformers lays them out: experts stacked, gate above up."""
    found = {name: value for name, value in values.items() if name in names}
    for name in names - set(found):
        parent, _, word = name.rpartition(".")
        count = len({key for key in values if key.startswith(f"{parent}.") and key.endswith("down_proj.weight")})
        projections = ("gate_proj", "up_proj") if word == "gate_up_proj" else (word,)
        experts = [
            torch.cat([values[f"{parent}.{expert}.{projection}.weight"] for projection in projections])
            for expert in range(count)
        ]
        found[name] = torch.stack(experts)
    return found


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_loaded_weights_are_our_dequantized_ones(folder: Path, kind: str, recipe: str) -> None:
    target = converted(folder, kind, recipe)
    model, info = load(target)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    values = our_values(target)
    mtp = {key for key in values if MTP_LAYER in key}
    assert all(MTP_LAYER in key for key in info["unexpected_keys"])
    loaded = model.state_dict()
    expected = expected_parameters(values, set(loaded))
    assert sum(value.numel() for value in expected.values()) == sum(
        value.numel() for name, value in values.items() if name not in mtp
    ), "every weight is looked at"
    for name, value in expected.items():
        assert not first_difference(value.to(loaded[name].dtype), loaded[name]), name
    assert len(quantized_sources(target)) > 10


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_its_config_class_reads_ours(folder: Path, kind: str, recipe: str) -> None:
    section = read_config(converted(folder, kind, recipe))["quantization_config"]
    config = AutoQuantizationConfig.from_dict(section)
    assert str(config.quant_method) in ("fp8", "mxfp8", "QuantizationMethod.FP8")
    assert list(config.weight_block_size) == section["weight_block_size"]
    assert config.modules_to_not_convert == section["modules_to_not_convert"]
    assert config.scale_fmt == ("float" if recipe == "fp8_block" else "ue8m0")


@pytest.mark.parametrize(("kind", "recipe"), CASES[:6])
def test_loaded_as_on_a_gpu(folder: Path, kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dequantization: only its check for a GPU is left out. Codes and scales must keep their values."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    target = converted(folder, kind, recipe)
    model, info = load(target)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded, stored = model.state_dict(), read_tensors(target)
    for name, source in quantized_sources(target).items():
        if source.parts["weight"].name not in loaded:
            continue  # a routed expert: stacked with the others
        scale = stored[source.parts["weight_scale_inv"].name]
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        assert not first_difference(stored[name], loaded[name])
        assert not first_difference(scale.float(), loaded[f"{name}_scale_inv"].float())
    layer = "model.layers.0.mlp.experts"
    if kind == "qwen3_moe":
        parts = [stored[f"{layer}.{expert}.down_proj.weight_scale_inv"] for expert in range(8)]
        scales = torch.stack([part.view(torch.float8_e8m0fnu) if part.dtype == torch.uint8 else part for part in parts])
        assert not first_difference(scales.float(), loaded[f"{layer}.down_proj_scale_inv"].float())


@pytest.mark.parametrize(
    ("kind", "recipe"), [("qwen3", "mxfp4_dense"), ("qwen3_moe", "mxfp4_mxfp8"), ("qwen3_moe", "int4_experts")]
)
def test_compressed_tensors_through_transformers(folder: Path, kind: str, recipe: str) -> None:
    """Dequantized while loading. Routed experts must be quantized in every layer, which `expressible` says too."""
    target = converted(folder, kind, recipe, ("policy.last=0",))
    model, info = load(target, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = {name: value for name, value in model.state_dict().items() if "scale" not in name}
    for name, value in expected_parameters(our_values(target), set(loaded)).items():
        assert not first_difference(value, loaded[name]), name
    if kind == "qwen3_moe":
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            load(converted(folder, kind, recipe), quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize(("rows", "effect"), [(256, "right"), (64, "right"), (192, "wrong"), (576, "refused")])
def test_ragged_blocks(rows: int, effect: str) -> None:
    """Why `expressible` refuses them: transformers divides the weight's size by the number of scales."""
    options = Fp8BlockOptions()
    x = np.random.default_rng(3).standard_normal((rows, 128), dtype=np.float32)
    x *= np.arange(1, rows + 1, dtype=np.float32)[:, None]  # so that no two blocks have the same scale
    arrays = get_format("fp8_block").quantize(x, options, None)
    ours = get_format("fp8_block").dequantize(arrays, options, np.dtype(np.float32))
    codes = torch.from_numpy(arrays.qdata.view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(arrays.scale)
    if effect == "refused":
        with pytest.raises(ValueError, match="not divisible by scale grid"):
            Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        return
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert (not first_difference(torch.from_numpy(ours), theirs)) == (effect == "right")


WORDS = ["model", "layers", "0", "1", "10", "11", "mlp", "gate", "gate_proj", "experts", "lm_head", "x1y"]
PATHS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
ENTRIES = PATHS | PATHS.map("{}.".format) | PATHS.map(lambda path: path.replace("1", ".*"))


@given(path=PATHS, entries=st.lists(ENTRIES, max_size=4))
def test_our_matching_is_its_matching(path: str, entries: list[str]) -> None:
    assert transformers_fp8(IgnoreList(entries), path, {}) == (not should_convert_module(path, entries))


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_on_a_gpu_it_would_convert_exactly_the_quantized_modules(folder: Path, kind: str, recipe: str) -> None:
    """Its own replacement, run on a model without weights: FP8 modules are those that hold quantized weights."""
    target = converted(folder, kind, recipe)
    section = read_config(target)["quantization_config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    config = AutoQuantizationConfig.from_dict(section)
    replaced = replace_with_fp8_linear(
        model, modules_to_not_convert=section["modules_to_not_convert"], quantization_config=config, pre_quantized=True
    )
    theirs = {
        name
        for name, module in replaced.named_modules()
        if isinstance(module, FP8Linear) or "FP8Experts" in type(module).__name__
    }
    quantized = {name.removesuffix(".weight") for name in quantized_sources(target) if MTP_LAYER not in name}
    ours = {name.partition(".experts.")[0] + ".experts" if ".experts." in name else name for name in quantized}
    assert theirs == ours
