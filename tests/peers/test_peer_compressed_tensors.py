"""compressed-tensors' own code reads what we write: its config classes, its matching and its decompressors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.utils.match import match_name
from hypothesis import given
from hypothesis import strategies as st
from peer_checkpoints import (
    converted,
    first_difference,
    our_values,
    quantized_sources,
    read_config,
    read_tensors,
    to_numpy,
    to_torch,
)

from lowprec.dialects import get_dialect
from lowprec.dialects.matching import IgnoreList, exact_or_regex
from lowprec.formats import get_format
from lowprec.formats.base import Options
from lowprec.formats.int4_group import Int4GroupOptions
from lowprec.formats.mxfp4 import Mxfp4Options

CASES: list[tuple[str, str, tuple[str, ...]]] = [
    ("qwen3", "mxfp4_dense", ()),
    ("qwen3_moe", "mxfp4_mxfp8", ()),
    ("deepseek_v3", "mxfp4_mxfp8", ("rules.0.weight.scale_rule=even",)),
    ("qwen3_moe", "int4_experts", ()),
    ("qwen3_moe", "int4_experts", ("rules.0.weight.group=128", "rules.0.weight.rule=amax7.5")),
    ("deepseek_v3", "int4_experts", ()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


def scheme_of(config: QuantizationConfig) -> QuantizationScheme:
    (scheme,) = config.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    return scheme


@pytest.mark.parametrize(("kind", "recipe", "overrides"), CASES)
def test_its_decompressor_returns_our_dequantized_values(
    folder: Path, kind: str, recipe: str, overrides: tuple[str, ...]
) -> None:
    target = converted(folder, kind, recipe, overrides)
    config = QuantizationConfig.model_validate(read_config(target)["quantization_config"])
    compressor = BaseCompressor.get_value_from_registry(config.format)
    scheme = scheme_of(config)
    stored, ours, quantized = read_tensors(target), our_values(target), quantized_sources(target)
    assert quantized
    for name, source in quantized.items():
        assert set(source.parts) == set(compressor.compression_param_names(scheme)), "exactly its own pieces"
        pieces = {word: stored[info.name] for word, info in source.parts.items()}
        theirs = compressor.decompress(pieces, scheme)["weight"]
        assert not first_difference(ours[name], theirs.data), name


@pytest.mark.parametrize(("kind", "recipe", "overrides"), CASES)
def test_its_config_says_what_we_meant(folder: Path, kind: str, recipe: str, overrides: tuple[str, ...]) -> None:
    target = converted(folder, kind, recipe, overrides)
    section = read_config(target)["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    scheme = scheme_of(config)
    assert (config.quant_method, str(config.quantization_status.value)) == ("compressed-tensors", "compressed")
    assert config.kv_cache_scheme is None
    assert config.ignore == section["ignore"]
    assert scheme.format is not None
    assert str(getattr(scheme.format, "value", scheme.format)) == config.format == section["format"]
    weights: Any = scheme.weights
    preset: Any = preset_name_to_scheme("MXFP4" if "mxfp4" in recipe else "W4A16", ["Linear"]).weights
    fields = ("num_bits", "type", "symmetric", "strategy", "dynamic", "scale_dtype")
    assert {field: getattr(weights, field) for field in fields} == {field: getattr(preset, field) for field in fields}
    if "mxfp4" in recipe:
        activations: Any = scheme.input_activations
        expected: Any = preset_name_to_scheme("MXFP8", ["Linear"]).input_activations
        fields = (*fields, "group_size")
        assert {field: getattr(activations, field) for field in fields} == {
            field: getattr(expected, field) for field in fields
        }
    else:
        assert scheme.input_activations is None


@pytest.mark.parametrize(("kind", "recipe", "overrides"), CASES)
def test_its_matching_finds_exactly_the_quantized_linears(
    folder: Path, kind: str, recipe: str, overrides: tuple[str, ...]
) -> None:
    target = converted(folder, kind, recipe, overrides)
    ignore = read_config(target)["quantization_config"]["ignore"]
    values, quantized = our_values(target), quantized_sources(target)
    linears = {name for name, value in values.items() if value.ndim == 2 and "embed" not in name}
    ignored = {name for name in linears if any(match_name(name.removesuffix(".weight"), entry) for entry in ignore)}
    assert linears - ignored == set(quantized)


WORDS = st.lists(
    st.sampled_from(["model", "layers", "0", "1", "10", "mlp", "gate", "gate_proj", "lm_head"]), max_size=5
)
PATHS = WORDS.map(".".join)
ENTRIES = PATHS | PATHS.map("re:{}".format) | PATHS.map("re:.*{}$".format)


@given(path=PATHS, entries=st.lists(ENTRIES, max_size=3))
def test_our_matching_is_its_matching(path: str, entries: list[str]) -> None:
    theirs = any(match_name(path, entry) for entry in entries)
    assert exact_or_regex(IgnoreList(entries), path, {}) == theirs


def test_shape_tensor_is_what_its_compressor_writes(folder: Path) -> None:
    target = converted(folder, "qwen3_moe", "int4_experts")
    scheme = scheme_of(QuantizationConfig.model_validate(read_config(target)["quantization_config"]))
    stored = read_tensors(target)
    name = next(name for name in stored if name.endswith("weight_shape"))
    weight = torch.zeros(tuple(stored[name].tolist()), dtype=torch.bfloat16)
    scale = stored[name.replace("weight_shape", "weight_scale")]
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").compress(
        {"weight": weight, "weight_scale": scale}, scheme
    )
    assert not first_difference(stored[name], theirs["weight_shape"])
    assert theirs["weight_packed"].dtype == torch.int32


def decompressed(section_of: str, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
    scheme = preset_name_to_scheme("MXFP4" if section_of.startswith("mxfp4") else "W4A16", ["Linear"])
    assert scheme.weights is not None
    scheme.weights.group_size = 32
    weight: torch.Tensor = BaseCompressor.get_value_from_registry(section_of).decompress(pieces, scheme)["weight"]
    return weight.data


def ours(options: Options, shape: tuple[int, int], pieces: dict[str, torch.Tensor]) -> torch.Tensor:
    arrays = {word: to_numpy(piece) for word, piece in pieces.items()}
    tensor = get_dialect("compressed_tensors").decode(options, shape, arrays)
    return to_torch(get_format(options.format).dequantize(tensor.arrays, options, np.dtype(ml_dtypes.bfloat16)))


def test_every_scale_byte_with_every_mxfp4_code() -> None:
    """One row a scale byte, 255 (NaN) left out; every row has all sixteen codes, in both nibbles."""
    nibbles = torch.arange(16, dtype=torch.uint8)
    row = torch.cat([nibbles | (nibbles.flip(0) << 4)])
    pieces = {
        "weight_packed": row.repeat(255, 1),
        "weight_scale": torch.arange(255, dtype=torch.uint8).reshape(255, 1),
    }
    theirs = decompressed("mxfp4-pack-quantized", pieces)
    assert not first_difference(ours(Mxfp4Options(), (255, 32), pieces), theirs)


def test_every_finite_scale_with_every_int4_code() -> None:
    """One row a finite bfloat16 scale of either sign; every row has all sixteen codes twice."""
    scales = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scales = scales[torch.isfinite(scales)].reshape(-1, 1)
    words = torch.tensor([0x76543210, -0x01234568], dtype=torch.int32)  # the second is 0xFEDCBA98
    pieces = {
        "weight_packed": words.repeat(len(scales), 2),
        "weight_scale": scales,
        "weight_shape": torch.tensor([len(scales), 32]),
    }
    theirs = decompressed("pack-quantized", pieces)
    assert not first_difference(ours(Int4GroupOptions(), (len(scales), 32), pieces), theirs)
