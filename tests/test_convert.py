"""convert and explain: every byte of the result against a second computation from the same pieces, and every file."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from folders import (
    DEEPSEEK_V3,
    INDEX,
    MODEL,
    QWEN3,
    QWEN3_MOE,
    Array,
    copy,
    edit_json,
    encode,
    load,
    load_folder,
    split,
    tree,
)

from lowprec import convert, dequantize, explain, load_recipe, quantize, verify
from lowprec.backends import global_amax
from lowprec.converters.report import Conversion, Progress
from lowprec.dialects import get_dialect
from lowprec.errors import PlanError, RecipeError
from lowprec.plan import Action

SOURCES = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}
DENSE = ("fp8_block", "fp8_block_ue8m0", "mxfp8", "nvfp4", "mxfp4_dense", "bf16")
MOE = (*DENSE, "nvfp4_experts", "mxfp4_mxfp8", "int4_experts")
CASES = [("qwen3", recipe) for recipe in DENSE] + [(m, r) for m in ("qwen3_moe", "deepseek_v3") for r in MOE]


def expected(source: dict[str, Array], conversion: Conversion) -> dict[str, Array]:
    """What must be stored, from the formats and the dialect alone."""
    dialect = get_dialect(conversion.dialect)
    stored = {}
    for step in conversion.plan.steps:
        name, options = step.tensor.name, step.weight
        if options is None:
            stored[name] = source[name]
            continue
        values = {partner: source[partner].astype(ml_dtypes.bfloat16) for partner in step.partners or (name,)}
        amax = max((global_amax(value, options) for value in values.values()), default=None) if step.partners else None
        pieces = dialect.encode(quantize(values[name], options, amax=amax))
        stored.update({dialect.part_name(name, word): array for word, array in pieces.items()})
    return stored


def require_equal(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert other.tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_every_byte_and_back(model: str, recipe: str, tmp_path: Path) -> None:
    source = load(SOURCES[model] / MODEL)
    report = convert(SOURCES[model], tmp_path / "a", recipe, workers=2)
    conversion = report.conversion
    assert report.tensors_written == len(conversion.plan.steps) == len(source)
    assert (report.bytes_read, report.bytes_written) == (conversion.bytes_before, conversion.bytes_after)
    require_equal(load_folder(tmp_path / "a"), expected(source, conversion))
    assert not verify(tmp_path / "a", against=SOURCES[model]).faults

    back = convert(tmp_path / "a", tmp_path / "b", "bf16").conversion
    assert not verify(tmp_path / "b", against=tmp_path / "a").faults
    dialect, pieces = get_dialect(conversion.dialect), load_folder(tmp_path / "a")
    values = dict(source)
    for step in conversion.plan.steps:
        if step.weight is not None:
            name = step.tensor.name
            words = dialect.parts(step.weight, step.source.shape)
            arrays = {word: pieces[dialect.part_name(name, word)] for word in words}
            values[name] = dequantize(dialect.decode(step.weight, step.source.shape, arrays))
    require_equal(load_folder(tmp_path / "b"), values)
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert {step.action for step in back.plan.steps} <= {Action.KEEP, Action.DEQUANTIZE}


def test_explain_reads_headers_alone_and_is_what_convert_does(tmp_path: Path) -> None:
    source = copy(QWEN3_MOE, tmp_path / "source")
    before = explain(source, "nvfp4").to_json()
    report = convert(source, tmp_path / "target", "nvfp4")
    assert report.conversion.to_json() == before
    json.dumps(before)
    json.dumps(report.to_json())
    # With the tensors gone, header and size left, explain says the same.
    data = (source / MODEL).read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    (source / MODEL).write_bytes(data[:length] + bytes(len(data) - length))
    files = tree(source)
    assert explain(source, "nvfp4").to_json() == before
    assert tree(source) == files


def test_a_recipe_may_be_a_name_a_path_or_a_record(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "mxfp8"\n[policy]\nlast = 0\n')
    digests = {
        explain(QWEN3, path).contract.digest,
        explain(QWEN3, str(path)).contract.digest,
        explain(QWEN3, load_recipe(path)).contract.digest,
        explain(QWEN3, "mxfp8", overrides=["policy.last=0"]).contract.digest,
    }
    assert len(digests) == 1
    assert explain(QWEN3, "mxfp8").contract.digest not in digests
    with pytest.raises(RecipeError, match="overrides go with a recipe's name or path"):
        explain(QWEN3, load_recipe("mxfp8"), overrides=["policy.last=0"])


def partner_apart(name: str) -> int:
    return int(name.endswith(("up_proj.weight", "k_proj.weight", "kv_a_proj_with_mqa.weight")))


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_partners_share_their_amax_across_files(model: str, tmp_path: Path) -> None:
    convert(SOURCES[model], tmp_path / "one", "nvfp4", workers=2)
    source = split(SOURCES[model], tmp_path / "source", partner_apart, 2)
    report = convert(source, tmp_path / "two", "nvfp4", workers=2)
    require_equal(load_folder(tmp_path / "two"), load_folder(tmp_path / "one"))
    tensors = load_folder(tmp_path / "two")
    groups = {step.partners for step in report.conversion.plan.steps if step.partners}
    assert groups
    for group in groups:
        scales = {tensors[name.removesuffix(".weight") + ".weight_scale_2"].tobytes() for name in group}
        assert len(scales) == 1


def test_files_are_kept_one_to_one(tmp_path: Path) -> None:
    source = split(QWEN3_MOE, tmp_path / "source", lambda name: len(name) % 3, 3)
    convert(source, tmp_path / "target", "fp8_block")
    index = json.loads((tmp_path / "target" / INDEX).read_text())
    found = {path.name: load(path) for path in (tmp_path / "target").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in found.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(a.nbytes for tensors in found.values() for a in tensors.values())
    was = json.loads((source / INDEX).read_text())["weight_map"]
    for name, file in index["weight_map"].items():
        assert file == was[name.removesuffix("_scale_inv")]


def test_dequantizing_puts_a_weight_where_its_codes_were(tmp_path: Path) -> None:
    convert(QWEN3, tmp_path / "fp8", "fp8_block")
    source = split(tmp_path / "fp8", tmp_path / "source", lambda name: int(name.endswith("_scale_inv")), 2)
    (source / "lowprec.json").unlink()
    convert(source, tmp_path / "target", "bf16")
    # Nothing is left for the file of the scales.
    assert sorted(path.name for path in (tmp_path / "target").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors"
    ]
    assert load_folder(tmp_path / "target").keys() == load(QWEN3 / MODEL).keys()
    assert not verify(tmp_path / "target", against=source).faults


def test_max_shard_size(tmp_path: Path) -> None:
    limit = 200_000
    convert(QWEN3_MOE, tmp_path / "many", "mxfp8", max_shard_size=limit)
    convert(QWEN3_MOE, tmp_path / "kept", "mxfp8")
    require_equal(load_folder(tmp_path / "many"), load_folder(tmp_path / "kept"))
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 5
    for file in files:
        tensors = load(tmp_path / "many" / file)
        modules = {name.rpartition(".")[0] for name in tensors}
        assert sum(array.nbytes for array in tensors.values()) <= limit or len(modules) == 1
    weight_map = json.loads((tmp_path / "many" / INDEX).read_text())["weight_map"]
    for name, file in weight_map.items():
        assert weight_map.get(f"{name}_scale_inv", file) == file
    assert not verify(tmp_path / "many", against=QWEN3_MOE).faults
    # Large enough for all: one file without an index, from many files too.
    convert(tmp_path / "many", tmp_path / "one", "bf16", max_shard_size=10**9)
    assert {MODEL} == {path.name for path in (tmp_path / "one").glob("*.safetensors")}
    assert not (tmp_path / "one" / INDEX).exists()
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(PlanError, match="the maximal shard size must be a positive number of bytes"):
            explain(QWEN3, "mxfp8", max_shard_size=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "recipe"), [("deepseek_v3", "nvfp4"), ("qwen3_moe", "int4_experts")])
def test_workers_and_repetition_give_the_same_bytes(model: str, recipe: str, tmp_path: Path) -> None:
    source = split(SOURCES[model], tmp_path / "source", partner_apart, 2)
    trees = []
    for number, workers in enumerate([1, 4, 4, None]):
        convert(source, tmp_path / str(number), recipe, workers=workers)
        trees.append(tree(tmp_path / str(number)))
    assert all(other == trees[0] for other in trees[1:])
    for name, data in trees[0].items():
        if name != MODEL:
            assert str(tmp_path).encode() not in data, name


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_source_dtypes_are_rounded_to_quantize_from_first(dtype: type, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def widen(tensors: dict[str, Array]) -> None:
        for name, array in tensors.items():
            noise = 1 + rng.standard_normal(array.shape, np.float32) / 1000  # below bfloat16's last place
            tensors[name] = (array.astype(np.float32) * noise).astype(dtype)

    source = copy(QWEN3, tmp_path / "source", widen)
    tensors = load(source / MODEL)
    conversion = convert(source, tmp_path / "target", "nvfp4").conversion
    found = load_folder(tmp_path / "target")
    require_equal(found, expected(tensors, conversion))
    assert found["model.norm.weight"].dtype == dtype  # what is kept is kept as it is
    assert not verify(tmp_path / "target", against=source).faults
    straight = quantize(tensors["model.layers.0.mlp.down_proj.weight"], conversion.plan.steps[3].weight or "")
    assert straight.qdata.tobytes() != found["model.layers.0.mlp.down_proj.weight"].tobytes()


def test_config_says_what_is_stored_and_nothing_of_before(tmp_path: Path) -> None:
    source = copy(QWEN3_MOE, tmp_path / "source")
    edit_json(
        source / "config.json",
        text_config={"compression_config": {"a": 1}, "keep": 1},
        zeta=[{"quantization_config": 1}],
    )
    plain = {**json.loads((source / "config.json").read_text()), "text_config": {"keep": 1}, "zeta": [{}]}
    for recipe, method in (("fp8_block", "fp8"), ("nvfp4", "modelopt"), ("int4_experts", "compressed-tensors")):
        convert(source, tmp_path / recipe, recipe)
        config = json.loads((tmp_path / recipe / "config.json").read_text())
        section = config.pop("quantization_config")
        assert config == plain
        assert section["quant_method"] == method
        assert (tmp_path / recipe / "hf_quant_config.json").exists() == (recipe == "nvfp4")
    convert(tmp_path / "nvfp4", tmp_path / "back", "bf16", overrides=["dtype=float16"])
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {**plain, "dtype": "float16"}
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()


CARRIED = {
    "tokenizer.json": b"{}", "tokenizer.model": b"\0\1", "merges.txt": b"a b", "chat_template.jinja": b"{{ x }}",
    "modeling_x.py": b"x = 1\n", "LICENSE": b"free", "README.md": b"# x", "qwen.tiktoken": b"x",
    "additional_chat_templates/rag.jinja": b"{}",
}  # fmt: skip
LEFT_OUT = {
    ".gitattributes": "hidden", "pytorch_model.bin": ".bin files are not carried over",
    "consolidated.safetensors": ".safetensors files are not carried over", "x.gguf": ".gguf files are not carried over",
    "pytorch_model.bin.index.json": "index of other weight files", "original": "a folder",
    "quantize_config.json": "quantization metadata of the source", "lowprec.json": "manifest of the source",
    "additional_chat_templates/notes.txt": "not a chat template",
}  # fmt: skip


def test_other_files_are_carried_by_the_documented_rule(tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "original").mkdir()
    for name, data in CARRIED.items():
        (source / name).write_bytes(data)
    for name in LEFT_OUT.keys() - {"original"}:
        (source / name).write_bytes(b"?")
    report = convert(source, tmp_path / "target", "mxfp8")
    layout = report.conversion.layout
    assert {item.name: item.reason for item in layout.left_out} == LEFT_OUT
    assert set(layout.carried) == {*CARRIED, "generation_config.json"}
    found = tree(tmp_path / "target")
    assert {name: found[name] for name in CARRIED} == CARRIED
    own = {"config.json", "generation_config.json", "lowprec.json", MODEL, "additional_chat_templates/"}
    assert found.keys() == {*CARRIED, *own}
    assert not verify(tmp_path / "target", against=source).faults


def test_progress_adds_up_and_an_exception_in_it_stops_the_run(tmp_path: Path) -> None:
    seen: list[Progress] = []
    report = convert(QWEN3_MOE, tmp_path / "target", "nvfp4", workers=3, progress=seen.append)
    total = report.conversion.bytes_before
    assert {item.total_bytes for item in seen} == {total}
    assert [item.done_bytes for item in seen] == sorted(item.done_bytes for item in seen)
    assert seen[-1].done_bytes == total
    assert {item.tensor for item in seen[:-1]} == {step.tensor.name for step in report.conversion.plan.steps}

    def stop(item: Progress) -> None:
        raise ZeroDivisionError(item.tensor)

    with pytest.raises(ZeroDivisionError):
        convert(QWEN3_MOE, tmp_path / "other", "nvfp4", workers=3, progress=stop)
    assert not (tmp_path / "other" / "config.json").exists()


def test_memory_is_bounded_by_tensors_not_by_files(tmp_path: Path) -> None:
    """One file of 118 MB; the largest weight to quantize has 0.25 MB, a kept one has 32 MB and comes in pieces."""
    source = copy(QWEN3, tmp_path / "source")
    layers, rows = 48, 65_536
    edit_json(source / "config.json", num_hidden_layers=layers, layer_types=None, vocab_size=rows)
    tensors = load(QWEN3 / MODEL)
    one = {name.removeprefix("model.layers.0."): array for name, array in tensors.items() if ".layers.0." in name}
    outer = {name: array for name, array in tensors.items() if ".layers." not in name}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        outer[name] = np.resize(outer[name], (rows, 256))
    many = {f"model.layers.{layer}.{name}": array for layer in range(layers) for name, array in one.items()}
    (source / MODEL).write_bytes(encode({**outer, **many}))
    assert (source / MODEL).stat().st_size > 110 << 20
    convert(QWEN3, tmp_path / "warm", "nvfp4")
    tracemalloc.start()
    try:
        convert(source, tmp_path / "target", "nvfp4", workers=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two workers, each with the piece of 8 MiB in hand and the next one, and the plan.
    assert peak < 40 << 20, f"{peak >> 20} MiB"
