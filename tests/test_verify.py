"""verify finds every damage there is, all of them at once, and never falls over one; inspect says what a folder is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from folders import (
    DEEPSEEK_V3,
    INDEX,
    MODEL,
    QWEN3,
    QWEN3_MOE,
    Array,
    Change,
    copy,
    edit_json,
    encode,
    load,
    load_folder,
    split,
    tree,
)

from lowprec import convert, dequantize, verify
from lowprec.converters.report import Progress
from lowprec.converters.staging import PARTIAL
from lowprec.dialects import get_dialect
from lowprec.errors import CheckpointError

DOWN = "model.layers.0.mlp.down_proj.weight"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
KEPT = "model.norm.weight"
SCALE = "model.layers.0.mlp.down_proj.weight_scale"
INVERSE = f"{DOWN}_scale_inv"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound target a recipe, not to be changed."""
    folder = tmp_path_factory.mktemp("targets")
    for recipe in ("fp8_block_ue8m0", "mxfp8", "nvfp4", "mxfp4_dense"):
        convert(QWEN3, folder / recipe, recipe)
    return {path.name: path for path in folder.iterdir()}


def flip_source_checksum(target: Path) -> None:
    """Another digit in what the manifest says of a source tensor, which nothing else in the target can contradict."""
    text = (target / "lowprec.json").read_text()
    at = text.index('"parts":{') + text[text.index('"parts":{') :].index('xxh3_128":"') + len('xxh3_128":"')
    (target / "lowprec.json").write_text(text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :])


def faults(target: Path, source: Path | None = None) -> set[tuple[str, str]]:
    report = verify(target, against=source)
    assert report.ok == (not report.faults)
    json.dumps(report.to_json())
    assert all(fault.what and "\n" not in fault.what for fault in report.faults)
    return {(fault.kind, fault.where) for fault in report.faults}


def test_sound_targets(targets: dict[str, Path]) -> None:
    for target in targets.values():
        seen: list[Progress] = []
        before = tree(target)
        report = verify(target, against=QWEN3, workers=3, progress=seen.append)
        assert report.faults == ()
        assert seen[-1].done_bytes == seen[-1].total_bytes == report.bytes
        assert report.digest == json.loads((target / "lowprec.json").read_text())["digest"]
        assert tree(target) == before


# ---- damaged tensors --------------------------------------------------------------------------------------------


def put(name: str, position: int, value: float) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name].reshape(-1)[position] = value

    return change


def put_byte(name: str, position: int, value: int) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name].reshape(-1).view(np.uint8)[position] = value

    return change


BYTES: dict[str, tuple[str, Callable[[dict[str, Array]], None], str, str, str]] = {
    "code": ("mxfp8", put_byte(DOWN, 7, 0x11), "", DOWN, ""),
    "kept": ("mxfp8", put_byte(KEPT, 3, 0x7E), "", KEPT, ""),
    "code NaN": ("mxfp8", put_byte(DOWN, 7, 0x7F), "scale", DOWN, "1 of its codes are NaN"),
    "E8M0 NaN": ("mxfp8", put_byte(INVERSE, 0, 255), "scale", DOWN, "1 of its E8M0 scales are NaN"),
    "E4M3 NaN": ("nvfp4", put_byte(SCALE, 0, 0xFF), "scale", DOWN, "1 of its block scales are NaN or Inf"),
    "E4M3 negative": ("nvfp4", put_byte(SCALE, 0, 0x81), "scale", DOWN, "1 of its block scales are negative"),
    "global zero": ("nvfp4", put(f"{SCALE}_2", 0, 0), "scale", DOWN, "1 of its global scales are not positive"),
    "global Inf": ("nvfp4", put(f"{SCALE}_2", 0, np.inf), "scale", DOWN, "1 of its global scales are NaN or Inf"),
    "partner": (
        "nvfp4", put(UP.replace("weight", "weight_scale_2"), 0, 1), "partners", UP,
        f"its global scale is not that of its partner '{GATE}'",
    ),
    "FP32 NaN": ("fp8_block_ue8m0", put(INVERSE, 0, np.nan), "scale", DOWN, "1 of its scales are NaN or Inf"),
    "FP32 zero": ("fp8_block_ue8m0", put(INVERSE, 1, 0), "scale", DOWN, "1 of its scales are not positive"),
    "FP32 not 2^n": (
        "fp8_block_ue8m0", put(INVERSE, 2, 0.3), "scale", DOWN,
        "1 of its scales are no powers of two, which the contract declares",
    ),
    "MXFP4 NaN": ("mxfp4_dense", put_byte(SCALE, 0, 255), "scale", DOWN, "1 of its E8M0 scales are NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", BYTES)
def test_one_wrong_value(case: str, targets: dict[str, Path], tmp_path: Path) -> None:
    """Its checksum differs, its kind is told, and against the source the byte."""
    recipe, change, kind, where, what = BYTES[case]
    target = copy(targets[recipe], tmp_path / "target")
    was = load(target / MODEL)
    tensors = {name: array.copy() for name, array in was.items()}
    change(tensors)
    (target / MODEL).write_bytes(reorder(targets[recipe] / MODEL, tensors))
    (stored,) = (name for name in was if was[name].tobytes() != tensors[name].tobytes())
    expected = {("checksum", stored)} | ({(kind, where)} if kind else set())
    report = verify(target)
    assert {(fault.kind, fault.where) for fault in report.faults} == expected
    assert what in {fault.what for fault in report.faults} | {""}
    assert faults(target, QWEN3) == {*expected, ("bytes", stored)}


def reorder(path: Path, tensors: dict[str, Array]) -> bytes:
    """The file with other bytes behind the same header."""
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")] + b"".join(array.tobytes() for array in tensors.values())


def test_the_wrong_byte_is_named(targets: dict[str, Path], tmp_path: Path) -> None:
    target = copy(targets["mxfp8"], tmp_path / "target")
    tensors = {name: array.copy() for name, array in load(target / MODEL).items()}
    code = tensors[DOWN].reshape(-1).view(np.uint8)
    was, code[1000] = int(code[1000]), 0x33
    (target / MODEL).write_bytes(reorder(target / MODEL, tensors))
    (found,) = (fault for fault in verify(target, against=QWEN3).faults if fault.kind == "bytes")
    assert found.what == f"byte 1000 is 0x33, the source gives {was:#04x}; 1 of 131072 bytes from 0 on differ"


def drop(name: str) -> Change:
    return lambda tensors: {other: array for other, array in tensors.items() if other != name}


def cast(
    name: str, dtype: object, shape: tuple[int, ...] | None = None
) -> Callable[[dict[str, Array]], dict[str, Array]]:
    def change(tensors: dict[str, Array]) -> dict[str, Array]:
        array = tensors[name]
        return {**tensors, name: array.view(dtype).reshape(shape or array.shape)}  # type: ignore[call-overload]

    return change


TENSORS = {
    "missing scale": (drop(INVERSE), INVERSE, "is missing from 'model.safetensors'"),
    "missing kept": (drop(KEPT), KEPT, "is missing from 'model.safetensors'"),
    "extra": (
        lambda tensors: {**tensors, "more": np.zeros(3, np.float32)},
        "more",
        "is in 'model.safetensors', but does not belong there",
    ),
    "uint8 codes": (cast(DOWN, np.uint8), DOWN, "is U8 [256, 512], the contract gives F8_E4M3 [256, 512]"),
    "E8M0-typed scales": (
        cast(INVERSE, ml_dtypes.float8_e8m0fnu),
        INVERSE,
        "is F8_E8M0 [256, 16], the contract gives U8 [256, 16]",
    ),
    "transposed scales": (
        cast(INVERSE, np.uint8, (16, 256)),
        INVERSE,
        "is U8 [16, 256], the contract gives U8 [256, 16]",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_wrong_tensors(case: str, targets: dict[str, Path], tmp_path: Path) -> None:
    change, where, what = TENSORS[case]
    target = copy(targets["mxfp8"], tmp_path / "target", change)
    for source in (None, QWEN3):
        (found,) = verify(target, against=source).faults
        assert (found.kind, found.where, found.what) == ("tensor", where, what)


# ---- damaged files ----------------------------------------------------------------------------------------------


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and write it in its own form, so that only the content is wrong."""
    path = folder / "lowprec.json"
    content = json.loads(path.read_text())
    change(content)

    def dump(value: object) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    tensors = content.pop("tensors")
    del content["xxh3_128"]
    lines = [f"{dump(key)}:{dump(value)}" for key, value in sorted(content.items())]
    rows = [f"{dump(key)}:{dump(value)}" for key, value in sorted(tensors.items())]
    body = ",\n".join([*lines, '"tensors":{' + ",\n".join(rows) + "}"])
    path.write_text(f'{{\n{body},\n"xxh3_128":"{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n')


def part(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest records of the source's piece of one tensor."""
    recorded: dict[str, Any] = manifest["tensors"][DOWN]["parts"]["weight"]
    return recorded


FILES: dict[str, tuple[Callable[[Path], object], set[tuple[str, str]]]] = {
    "shard gone": (lambda t: (t / MODEL).unlink(), {("file", MODEL)}),
    "shard cut": (lambda t: (t / MODEL).write_bytes((t / MODEL).read_bytes()[:-9]), {("file", MODEL)}),
    "tensors moved": (
        lambda t: (t / MODEL).write_bytes(encode(dict(sorted(load(t / MODEL).items())))), {("file", MODEL)},
    ),
    "second file": (lambda t: (t / "x.safetensors").write_bytes(b""), {("file", "x.safetensors")}),
    "index": (lambda t: (t / INDEX).write_text("{}"), {("index", INDEX)}),
    "unfinished": (lambda t: (t / PARTIAL).mkdir(), {("file", PARTIAL)}),
    "carried": (lambda t: (t / "generation_config.json").write_text("{}"), {("file", "generation_config.json")}),
    "carried gone": (lambda t: (t / "generation_config.json").unlink(), {("file", "generation_config.json")}),
    "config": (lambda t: edit_json(t / "config.json", quantization_config=None), {("config", "config.json")}),
    "config of the model": (
        lambda t: edit_json(t / "config.json", hidden_act="sklu"),
        {("config", "config.json")},
    ),
    "config by a byte": (
        lambda t: (t / "config.json").write_text((t / "config.json").read_text() + " "),
        {("config", "config.json")},
    ),
    "source's checksum": (flip_source_checksum, {("manifest", "lowprec.json")}),
    "config gone": (lambda t: (t / "config.json").unlink(), {("config", "config.json")}),
    "config broken": (lambda t: (t / "config.json").write_text("{"), {("config", "config.json")}),
    "manifest gone": (lambda t: (t / "lowprec.json").unlink(), {("manifest", "lowprec.json")}),
    "manifest broken": (lambda t: (t / "lowprec.json").write_text("{"), {("manifest", "lowprec.json")}),
    "all broken": (
        lambda t: [(t / name).write_text("{") for name in ("lowprec.json", "config.json", MODEL)],
        {("manifest", "lowprec.json"), ("config", "config.json"), ("file", MODEL)},
    ),
    "digest": (lambda t: edit_manifest(t, lambda m: m.update(digest="0" * 64)), {("contract", "lowprec.json")}),
    "engines": (lambda t: edit_manifest(t, lambda m: m.update(loads=["vllm"])), {("engines", "lowprec.json")}),
    "version": (lambda t: edit_manifest(t, lambda m: m.update(format_version=7)), {("manifest", "lowprec.json")}),
    "contract": (
        lambda t: edit_manifest(t, lambda m: m["contract"]["backward"].update(mode="high_precision")),
        {("contract", "lowprec.json")},
    ),
    "contract key": (
        lambda t: edit_manifest(t, lambda m: m["contract"].update(more=1)), {("manifest", "lowprec.json")},
    ),
    "recorded dtype": (
        lambda t: edit_manifest(t, lambda m: m["tensors"][DOWN]["outputs"][0].update(dtype="U8")),
        {("manifest", DOWN)},
    ),
    "recorded piece": (
        lambda t: edit_manifest(t, lambda m: m["tensors"][DOWN].update(parts={"x": part(m)})),
        {("manifest", "lowprec.json")},
    ),
    "recorded file": (
        lambda t: edit_manifest(t, lambda m: m["tensors"][DOWN]["outputs"][0].update(shard="../x")),
        {("manifest", "lowprec.json")},
    ),
    "recorded tensor": (
        lambda t: edit_manifest(t, lambda m: m["tensors"].pop(DOWN)),
        {("tensor", DOWN), ("tensor", INVERSE)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_damaged_files(case: str, targets: dict[str, Path], tmp_path: Path) -> None:
    change, expected = FILES[case]
    target = copy(targets["mxfp8"], tmp_path / "target")
    change(target)
    assert faults(target) == expected
    assert faults(target, QWEN3) >= expected


def test_an_index_that_lies(tmp_path: Path) -> None:
    convert(QWEN3, tmp_path / "sound", "mxfp8", max_shard_size=500_000)
    index = json.loads((tmp_path / "sound" / INDEX).read_text())
    target = copy(tmp_path / "sound", tmp_path / "target")
    index["metadata"]["total_size"] += 1
    moved = index["weight_map"][KEPT]
    index["weight_map"][KEPT] = next(file for file in index["weight_map"].values() if file != moved)
    (target / INDEX).write_text(json.dumps(index))
    assert faults(target) == {("index", INDEX), ("index", KEPT)}


def test_all_faults_are_found_at_once(targets: dict[str, Path], tmp_path: Path) -> None:
    target = copy(targets["nvfp4"], tmp_path / "target")
    tensors = {name: array.copy() for name, array in load(target / MODEL).items()}
    put_byte(SCALE, 0, 0x7F)(tensors)
    put_byte(DOWN, 5, 0x99)(tensors)
    put(UP.replace("weight", "weight_scale_2"), 0, 3)(tensors)
    (target / MODEL).write_bytes(reorder(target / MODEL, tensors))
    edit_json(target / "config.json", vocab_size=5)
    (target / "generation_config.json").unlink()
    up_scale = UP.replace("weight", "weight_scale_2")
    stored = {SCALE, DOWN, up_scale}
    assert faults(target, QWEN3) == {
        *(("checksum", name) for name in stored),
        *(("bytes", name) for name in stored),
        ("scale", DOWN),
        ("partners", UP),
        ("config", "config.json"),
        ("file", "generation_config.json"),
    }


# ---- another source ---------------------------------------------------------------------------------------------


def test_another_source_is_told(targets: dict[str, Path], tmp_path: Path) -> None:
    changed = copy(QWEN3, tmp_path / "changed", put(DOWN, 5, 2.0))
    found = faults(targets["mxfp8"], changed)
    assert ("source", DOWN) in found
    assert ("bytes", DOWN) in found
    # The test writes its own header, so the file's fingerprint differs too.
    assert found - {("source", MODEL), ("bytes", INVERSE)} == {("source", DOWN), ("bytes", DOWN)}
    found = faults(targets["mxfp8"], QWEN3_MOE)
    assert {kind for kind, _ in found} >= {"source"}
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(targets["mxfp8"], against=tmp_path / "missing")


@pytest.mark.parametrize("recipe", ["fp8_block", "int4_experts"])
def test_dequantized_targets_against_their_quantized_source(recipe: str, tmp_path: Path) -> None:
    source = split(DEEPSEEK_V3, tmp_path / "plain", lambda name: len(name) % 2, 2)
    convert(source, tmp_path / "low", recipe)
    convert(tmp_path / "low", tmp_path / "back", "bf16")
    report = verify(tmp_path / "back", against=tmp_path / "low")
    assert report.faults == ()
    assert report.errors == ()
    shard = sorted((tmp_path / "back").glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert {kind for kind, _ in faults(tmp_path / "back", tmp_path / "low")} == {"checksum", "bytes"}


def test_errors_are_those_of_the_definition(targets: dict[str, Path]) -> None:
    source, stored, dialect = load(QWEN3 / MODEL), load_folder(targets["nvfp4"]), get_dialect("modelopt_nvfp4")
    conversion = convert(QWEN3, targets["nvfp4"], "nvfp4").conversion
    report = verify(targets["nvfp4"], against=QWEN3)
    roles: dict[str, list[tuple[Array, Array]]] = {}
    for step in conversion.plan.steps:
        if step.weight is not None:
            words = dialect.parts(step.weight, step.source.shape)
            arrays = {word: stored[dialect.part_name(step.tensor.name, word)] for word in words}
            decoded = dequantize(dialect.decode(step.weight, step.source.shape, arrays), "float32")
            pair = (source[step.tensor.name].astype(np.float64), decoded.astype(np.float64))
            roles.setdefault(step.tensor.role, []).append(pair)
    assert [error.role for error in report.errors] == sorted(roles)
    for error in report.errors:
        pairs = roles[error.role]
        signal = sum(float((x * x).sum()) for x, _ in pairs)
        noise = sum(float(((x - d) ** 2).sum()) for x, d in pairs)
        assert error.tensors == len(pairs)
        assert math.isclose(error.sqnr_db, 10 * math.log10(signal / noise), rel_tol=1e-9)
        assert error.max_relative_error == max(float(np.abs(x - d).max() / np.abs(x).max()) for x, d in pairs)
