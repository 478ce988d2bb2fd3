"""Reading sources: which dialect a config is, how stored tensors become logical ones, and what is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec.dialects import detect, get_dialect
from lowprec.errors import CheckpointError
from lowprec.formats.base import Options
from lowprec.formats.fp8_block import Fp8BlockOptions, Scale
from lowprec.formats.int4_group import Int4GroupOptions
from lowprec.formats.mxfp4 import Mxfp4Options
from lowprec.formats.mxfp8 import Mxfp8Options
from lowprec.formats.nvfp4 import Nvfp4Options
from lowprec.plan import SourceTensor, TensorInfo

Json = dict[str, Any]

FP8: Json = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
MXFP8: Json = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
NVFP4: Json = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
NESTED: Json = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}


def packed(format_name: str, kind: str, group: int) -> Json:
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": group, "symmetric": True}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group_0}}


MXFP4 = packed("mxfp4-pack-quantized", "float", 32)
INT4 = packed("pack-quantized", "int", 128)

SOURCES: list[tuple[str, Json, Options]] = [
    ("deepseek_fp8", {"quantization_config": FP8}, Fp8BlockOptions()),
    (
        "deepseek_fp8",
        {"quantization_config": {**FP8, "scale_fmt": "ue8m0", "weight_block_size": [64, 32]}},
        Fp8BlockOptions(scale=Scale.POW2, block=(64, 32)),
    ),
    ("deepseek_fp8", {"text_config": {"quantization_config": FP8}}, Fp8BlockOptions()),
    ("sglang_mxfp8", {"quantization_config": {**MXFP8, "modules_to_not_convert": ["lm_head"]}}, Mxfp8Options()),
    ("vllm_mxfp8", {"quantization_config": {**MXFP8, "ignored_layers": ["lm_head"]}}, Mxfp8Options()),
    ("modelopt_nvfp4", {"quantization_config": NVFP4}, Nvfp4Options()),
    ("modelopt_nvfp4", {"quantization_config": {**NVFP4, "quant_method": "modelopt_fp4"}}, Nvfp4Options()),
    ("modelopt_nvfp4", {"hf_quant_config": NESTED}, Nvfp4Options()),
    ("compressed_tensors", {"quantization_config": MXFP4}, Mxfp4Options()),
    ("compressed_tensors", {"quantization_config": INT4}, Int4GroupOptions(group=128)),
    ("compressed_tensors", {"compression_config": INT4}, Int4GroupOptions(group=128)),
]

NAME = "model.layers.0.mlp.up_proj"


def stored(**pieces: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """`<NAME>.<word>` of each piece, and a norm."""
    infos = {f"{NAME}.{word}": (dtype, shape) for word, (dtype, shape) in pieces.items()}
    infos["model.norm.weight"] = ("BF16", (128,))
    return {name: TensorInfo(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in infos.items()}


def written(name: str, options: Options, shape: tuple[int, int] = (128, 256)) -> dict[str, TensorInfo]:
    return stored(**get_dialect(name).parts(options, shape))


def one(sources: tuple[SourceTensor, ...]) -> SourceTensor:
    (found,) = (source for source in sources if source.name == f"{NAME}.weight")
    return found


@pytest.mark.parametrize(("name", "config", "options"), SOURCES, ids=str)
def test_a_source_is_recognized_and_grouped(name: str, config: Json, options: Options) -> None:
    dialect = detect(config)
    assert dialect.name == name
    infos = written(name, options)
    sources = dialect.logical(config, infos)
    assert [source.name for source in sources] == [f"{NAME}.weight", "model.norm.weight"]
    source = one(sources)
    assert (source.stored, source.shape) == (options, (128, 256))
    used = [part.name for item in sources for part in item.parts.values()]
    assert sorted(used) == sorted(infos), "every stored tensor exactly once"
    assert {word: info.name for word, info in source.parts.items()} == {
        word: f"{NAME}.{word}" for word in dialect.parts(options, (128, 256))
    }
    plain = next(item for item in sources if item.name == "model.norm.weight")
    assert (plain.stored, plain.dtype, set(plain.parts)) == (None, "BF16", {"weight"})


@pytest.mark.parametrize(("name", "config", "options"), SOURCES, ids=str)
def test_kept_weights_stay_plain(name: str, config: Json, options: Options) -> None:
    del options
    source = one(get_dialect(name).logical(config, stored(weight=("BF16", (128, 256)))))
    assert (source.stored, source.dtype, source.shape) == (None, "BF16", (128, 256))


@pytest.mark.parametrize(("name", "config", "options"), SOURCES, ids=str)
def test_a_missing_or_wrong_piece_is_refused_by_name(name: str, config: Json, options: Options) -> None:
    dialect, infos = get_dialect(name), written(name, options)
    for gone in [key for key in infos if key.startswith(NAME) and not key.endswith("input_scale")]:
        rest = {key: info for key, info in infos.items() if key != gone}
        with pytest.raises(CheckpointError, match=NAME):
            dialect.logical(config, rest)
    for changed in [key for key in infos if key.startswith(NAME)]:
        for dtype, shape in (("F8_E8M0", infos[changed].shape), (infos[changed].dtype, (*infos[changed].shape, 2))):
            wrong = {**infos, changed: TensorInfo(name=changed, dtype=dtype, shape=shape)}
            with pytest.raises(CheckpointError, match=NAME):
                dialect.logical(config, wrong)


def test_sglang_would_read_e8m0_scales_as_zeros() -> None:
    infos = stored(weight=("F8_E4M3", (128, 256)), weight_scale_inv=("F8_E8M0", (128, 8)))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv' is F8_E8M0 .* weight_scale_inv U8 \[128, 8\]"):
        get_dialect("sglang_mxfp8").logical({"quantization_config": MXFP8}, infos)


def test_weight_shape_of_released_checkpoints_is_i32() -> None:
    infos = written("compressed_tensors", Int4GroupOptions(group=128))
    name = f"{NAME}.weight_shape"
    infos[name] = TensorInfo(name=name, dtype="I32", shape=(2,))
    source = one(get_dialect("compressed_tensors").logical({"quantization_config": INT4}, infos))
    assert source.parts["weight_shape"].dtype == "I32"


def test_input_scale_may_be_missing() -> None:
    infos = written("modelopt_nvfp4", Nvfp4Options())
    del infos[f"{NAME}.input_scale"]
    source = one(get_dialect("modelopt_nvfp4").logical({"quantization_config": NVFP4}, infos))
    assert sorted(source.parts) == ["weight", "weight_scale", "weight_scale_2"]


LOST = [
    {"weight": ("F8_E4M3", (128, 256))},  # the scale and the config are missing
    {"weight": ("BF16", (128, 256)), "weight_scale_inv": ("F32", (1, 2))},
    {"weight": ("U8", (128, 128))},
    {"weight_packed": ("I32", (128, 32))},
    {"weight": ("BF16", (128, 256)), "input_scale": ("F32", ())},
    {"k_scale": ("F32", ())},
]


@pytest.mark.parametrize("pieces", LOST, ids=str)
def test_quantized_bytes_in_a_bf16_checkpoint_are_refused(pieces: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert detect({"model_type": "llama"}).name == "bf16"
    with pytest.raises(CheckpointError, match=NAME):
        get_dialect("bf16").logical({}, stored(**pieces))


def test_a_bf16_checkpoint_with_a_quantization_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a bf16 checkpoint"):
        get_dialect("bf16").logical({"quantization_config": FP8}, stored(weight=("BF16", (128, 256))))


UNKNOWN = [
    ({"quant_method": "gptq", "bits": 4}, r"'quant_method': 'gptq'.*known are .*fp8"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'quant_algo': 'FP8'"),
    ({}, "quantization {} is not known"),
    ({"quant_method": ["fp8"]}, "not known"),
    ("fp8", "quantization_config must be a table"),
    ([], "quantization_config must be a table"),
    ({"quantization": 3}, r"quantization_config\.quantization must be a table"),
]


@pytest.mark.parametrize(("section", "message"), UNKNOWN, ids=str)
def test_an_unknown_quantization_says_what_is_known(section: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        detect({"quantization_config": section})


BROKEN: list[tuple[str, Json, Json, str]] = [
    ("deepseek_fp8", FP8, {"activation_scheme": None}, "activation_scheme is missing"),
    ("deepseek_fp8", FP8, {"activation_scheme": "static"}, "activation_scheme is 'static'"),
    ("deepseek_fp8", FP8, {"weight_block_size": None}, "weight_block_size is None"),
    ("deepseek_fp8", FP8, {"weight_block_size": [128]}, "2 positive integers"),
    ("deepseek_fp8", FP8, {"weight_block_size": [128, True]}, "2 positive integers"),
    ("deepseek_fp8", FP8, {"weight_block_size": [128, 0]}, "2 positive integers"),
    ("deepseek_fp8", FP8, {"weight_block_size": "128"}, "2 positive integers"),
    ("deepseek_fp8", FP8, {"fmt": "e5m2"}, "fmt is 'e5m2'"),
    ("deepseek_fp8", FP8, {"scale_fmt": "e8m0"}, "scale_fmt is 'e8m0'"),
    ("deepseek_fp8", FP8, {"modules_to_not_convert": "lm_head"}, "must be a list of strings"),
    ("sglang_mxfp8", MXFP8, {"weight_block_size": [1, 128]}, r"weight_block_size is \[1, 128\]"),
    ("vllm_mxfp8", {**MXFP8, "ignored_layers": []}, {"ignored_layers": [1]}, "must be a list of strings"),
    ("modelopt_nvfp4", NVFP4, {"group_size": 32}, "group_size is 32"),
    ("modelopt_nvfp4", NVFP4, {"group_size": 16.0}, "must be a positive integer"),
    ("modelopt_nvfp4", NVFP4, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ("compressed_tensors", INT4, {"config_groups": None}, "config_groups is missing"),
    ("compressed_tensors", INT4, {"config_groups": {}}, "has 0 groups"),
    ("compressed_tensors", INT4, {"config_groups": {"a": {}, "b": {}}}, "has 2 groups"),
    ("compressed_tensors", INT4, {"config_groups": {"a": 1}}, "config_groups.a must be a table"),
    ("compressed_tensors", INT4, {"format": "naive-quantized"}, "format is 'naive-quantized'"),
    ("compressed_tensors", INT4, {"format": None}, "format is missing"),
    ("compressed_tensors", INT4, {"quantization_status": "frozen"}, "quantization_status"),
]
BROKEN_WEIGHTS: list[tuple[Json, Json, str]] = [
    (INT4, {"num_bits": 8}, "num_bits is 8"),
    (INT4, {"num_bits": 4.0}, "num_bits is 4.0"),
    (INT4, {"type": "float"}, "type is 'float'"),
    (INT4, {"strategy": "channel"}, "strategy is 'channel'"),
    (INT4, {"symmetric": False}, "symmetric is False"),
    (INT4, {"group_size": 64}, "group cannot be 64"),
    (INT4, {"group_size": -1}, "positive integer"),
    (MXFP4, {"group_size": 16}, "group_size is 16"),
]


@pytest.mark.parametrize(("name", "good", "change", "message"), BROKEN, ids=str)
def test_an_inconsistent_config_is_one_error(name: str, good: Json, change: Json, message: str) -> None:
    section = {key: value for key, value in {**good, **change}.items() if value is not None}
    if "weight_block_size" in change and change["weight_block_size"] is None:
        section.pop("weight_block_size", None)
    with pytest.raises(CheckpointError, match=message):
        get_dialect(name).logical({"quantization_config": section}, stored(weight=("BF16", (128, 256))))


@pytest.mark.parametrize(("good", "change", "message"), BROKEN_WEIGHTS, ids=str)
def test_inconsistent_weight_arguments_are_one_error(good: Json, change: Json, message: str) -> None:
    section = copy.deepcopy(good)
    section["config_groups"]["group_0"]["weights"].update(change)
    with pytest.raises(CheckpointError, match=message):
        get_dialect("compressed_tensors").logical({"quantization_config": section}, stored(weight=("BF16", (1, 2))))


def _places(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of nested tables."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield (*path, key)
            yield from _places(value, (*path, key))


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats(allow_nan=True)
    | st.sampled_from(["fp8", "", "group"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "a"]), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data())
def test_a_hostile_config_is_read_or_refused_but_never_crashes(data: st.DataObject) -> None:
    name, config, options = data.draw(st.sampled_from(SOURCES))
    config = copy.deepcopy(config)
    path = data.draw(st.sampled_from(sorted(_places(config))))
    node: Any = config
    for key in path[:-1]:
        node = node[key]
    if data.draw(st.booleans()):
        del node[path[-1]]
    else:
        node[path[-1]] = data.draw(HOSTILE)
    with contextlib.suppress(CheckpointError):
        detect(config).logical(config, written(name, options))


DTYPES = ("F8_E4M3", "F8_E8M0", "U8", "BF16", "F32", "I32", "I64", "F4")
SHAPES = st.lists(st.integers(0, 300), max_size=3).map(tuple)
WORDS = ("weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_scale_2", "input_scale")


@given(
    source=st.sampled_from(SOURCES),
    pieces=st.dictionaries(st.sampled_from(WORDS), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=4),
)
def test_hostile_headers_are_read_or_refused(
    source: tuple[str, Json, Options], pieces: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    name, config, _ = source
    with contextlib.suppress(CheckpointError):
        found = get_dialect(name).logical(config, stored(**pieces))
        assert sum(len(item.parts) for item in found) == len(pieces) + 1, "every stored tensor exactly once"
