"""Bad sources and targets: one line that says what, where and what to do; nothing written, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
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

from lowprec import convert, explain, inspect, verify
from lowprec.errors import CheckpointError, FormatError, LowprecError, PlanError, RecipeError

DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"


def refused(kind: type[LowprecError], message: str, source: Path, target: Path, recipe: str = "mxfp8") -> None:
    """convert refuses with exactly this line and writes nothing."""
    with pytest.raises(LowprecError) as caught:
        convert(source, target, recipe)
    assert str(caught.value) == message
    assert type(caught.value) is kind
    assert not target.exists()


# ---- the source as a folder -------------------------------------------------------------------------------------


def broken(tmp_path: Path, change: Callable[[Path], object], base: Path = QWEN3) -> Path:
    source = copy(base, tmp_path / "source")
    change(source)
    return source


def set_index(folder: Path, **weight_map: object) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"].update(weight_map)
    (folder / INDEX).write_text(json.dumps(content))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda s: (s / "config.json").unlink(),
        "'{s}' has no config.json; give the folder of a Hugging Face checkpoint",
    ),
    "config no json": (
        lambda s: (s / "config.json").write_text("{,}"),
        "'{s}/config.json' is not valid JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
    ),
    "config a list": (lambda s: (s / "config.json").write_text("[1]"), "'{s}/config.json' is not a JSON object"),
    "config deep": (
        lambda s: (s / "config.json").write_text('{"a":' + "[" * 200 + "]" * 200 + "}"),
        "'{s}/config.json' is nested too deeply: more than 50 levels",
    ),
    "config not text": (
        lambda s: (s / "config.json").write_bytes(b"\xff"),
        "'{s}/config.json' is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "config a folder": (
        lambda s: ((s / "config.json").unlink(), (s / "config.json").mkdir()),
        "'{s}/config.json' is not a regular file",
    ),
    "config links away": (
        lambda s: ((s / "config.json").unlink(), (s / "config.json").symlink_to(QWEN3 / "config.json")),
        f"'{{s}}/config.json' is a link that leads out of the folder, to '{QWEN3 / 'config.json'}'",
    ),
    "config links in a circle": (
        lambda s: ((s / "config.json").unlink(), (s / "config.json").symlink_to("config.json")),
        "'{s}/config.json' cannot be read: it is a loop of links",
    ),
    "no model_type": (
        lambda s: edit_json(s / "config.json", model_type=None),
        "'{s}': config.json has no model_type; it names the model family",
    ),
    "no weights": (
        lambda s: (s / MODEL).unlink(),
        "'{s}' has neither model.safetensors nor model.safetensors.index.json; "
        "only safetensors checkpoints can be read",
    ),
    "both": (
        lambda s: (s / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "'{s}' has both model.safetensors and model.safetensors.index.json; remove the one that is not the model",
    ),
    "shard links away": (
        lambda s: ((s / MODEL).unlink(), (s / MODEL).symlink_to(QWEN3 / MODEL)),
        f"'{{s}}/model.safetensors' is a link that leads out of the folder, to '{QWEN3 / MODEL}'",
    ),
    "tokenizer links away": (
        lambda s: (s / "tokenizer.json").symlink_to("/etc/hostname"),
        "'{s}/tokenizer.json' is a link that leads out of the folder, to '/etc/hostname'",
    ),
    "truncated": (
        lambda s: os.truncate(s / MODEL, 3_000_000),
        "'{s}/model.safetensors' is truncated: the header describes 3874800 bytes, the file has 3000000; "
        "fetch it again",
    ),
    "quantized twice": (
        lambda s: edit_json(s / "config.json", quantization_config={"quant_method": "awq"}),
        "config.json: quantization {'quant_method': 'awq'} is not known; known are compressed-tensors, fp8, modelopt, "
        "modelopt_fp4, mxfp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_sources_that_are_no_checkpoints(case: str, tmp_path: Path) -> None:
    change, message = FOLDERS[case]
    source = broken(tmp_path, change)
    kind = PlanError if case == "no model_type" else CheckpointError
    refused(kind, message.replace("{s}", str(source)), source, tmp_path / "target")


def test_sources_that_are_no_folders(tmp_path: Path) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_text("x")
    refused(CheckpointError, f"'{missing}' does not exist", missing, tmp_path / "target")
    message = f"'{file}' is a file; give the folder of a Hugging Face checkpoint"
    refused(CheckpointError, message, file, tmp_path / "target")
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(missing)
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect(missing)


SECOND = "model-00002-of-00002.safetensors"
INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "outside": (
        lambda s: set_index(s, **{NORM: "../elsewhere.safetensors"}),
        "'{s}/{i}' places tensor 'model.norm.weight' in '../elsewhere.safetensors', which is not a file of the folder",
    ),
    "absolute": (
        lambda s: set_index(s, **{NORM: "/etc/passwd"}),
        "'{s}/{i}' places tensor 'model.norm.weight' in '/etc/passwd', which is not a file of the folder",
    ),
    "number": (
        lambda s: set_index(s, **{NORM: 1}),
        "'{s}/{i}' places tensor 'model.norm.weight' in 1, which is not a file of the folder",
    ),
    "our manifest": (
        lambda s: set_index(s, **{NORM: "lowprec.json"}),
        "'{s}/{i}' places tensor 'model.norm.weight' in 'lowprec.json', which is no .safetensors file",
    ),
    "hidden": (
        lambda s: set_index(s, **{NORM: ".lowprec-partial.safetensors"}),
        "'{s}/{i}' places tensor 'model.norm.weight' in '.lowprec-partial.safetensors', which is no .safetensors file",
    ),
    "no such file": (
        lambda s: set_index(s, **{NORM: "x.safetensors"}),
        "{i} names 'x.safetensors', which is not in '{s}'",
    ),
    "wrong file": (
        lambda s: set_index(s, **{NORM: SECOND}),
        f"{{i}} places tensor 'model.norm.weight' in '{SECOND}', which does not hold it",
    ),
    "nowhere": (
        lambda s: set_index(s, **{"model.extra.weight": SECOND}),
        f"{{i}} places tensor 'model.extra.weight' in '{SECOND}', which does not hold it",
    ),
    "not named": (
        lambda s: (s / SECOND).write_bytes(encode({**load(s / SECOND), "extra": np.zeros(4, np.float32)})),
        f"'{SECOND}' holds tensor 'extra', which {{i}} does not name",
    ),
    "in two files": (
        lambda s: (s / SECOND).write_bytes(encode({**load(s / SECOND), NORM: np.zeros(4, np.float32)})),
        f"tensor 'model.norm.weight' lies in both 'model-00001-of-00002.safetensors' and '{SECOND}'",
    ),
    "named twice": (
        lambda s: (s / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
        "'{s}/{i}' is not valid JSON: the key 'a' occurs twice",
    ),
    "empty": (lambda s: (s / INDEX).write_text('{"weight_map": {}}'), "'{s}/{i}' has no weight_map"),
    "shard gone": (lambda s: (s / SECOND).unlink(), f"{{i}} names '{SECOND}', which is not in '{{s}}'"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_indexes_that_lie(case: str, tmp_path: Path) -> None:
    change, message = INDEXES[case]
    source = split(QWEN3, tmp_path / "source", lambda name: int(name != NORM), 2)
    change(source)
    refused(CheckpointError, message.replace("{s}", str(source)).replace("{i}", INDEX), source, tmp_path / "target")


def test_the_layout_of_the_hub_cache_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    shutil.copytree(QWEN3, blobs)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "target", "mxfp8")
    convert(QWEN3, tmp_path / "plain", "mxfp8")
    assert tree(tmp_path / "target") == tree(tmp_path / "plain")
    assert not any(path.is_symlink() for path in (tmp_path / "target").iterdir())


# ---- values and shapes ------------------------------------------------------------------------------------------


def put(name: str, value: float, dtype: object = None) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        if dtype is not None:
            tensors[name] = tensors[name].astype(dtype)  # type: ignore[call-overload]
        tensors[name].reshape(-1)[-1] = value

    return change


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("name", [DOWN, NORM])
def test_nan_and_inf_are_refused_by_name_unless_allowed(value: float, dtype: type, name: str, tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "source", put(name, value, dtype))
    message = f"tensor '{name}' holds NaN or Inf; repair the source, or give --allow-nonfinite to carry it over"
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "target", "mxfp8")
    assert str(caught.value) == message
    assert not (tmp_path / "target" / "config.json").exists()
    convert(source, tmp_path / "target", "mxfp8", allow_nonfinite=True)  # goes on where it was refused
    report = verify(tmp_path / "target", against=source)
    assert {fault.kind for fault in report.faults} <= {"scale"}
    kept = load_folder(tmp_path / "target")[NORM]
    assert kept.tobytes() == load(source / MODEL)[NORM].tobytes()


def test_a_value_that_a_format_turns_into_inf_is_refused(tmp_path: Path) -> None:
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    source = copy(QWEN3, tmp_path / "source", put(DOWN, largest))
    with pytest.raises(FormatError) as caught:
        convert(source, tmp_path / "target", "mxfp8", allow_nonfinite=True)
    assert str(caught.value) == (
        f"tensor '{DOWN}': its largest value 3.39e+38 decodes to Inf in mxfp8; keep its role or choose another recipe"
    )
    convert(source, tmp_path / "fp8", "fp8_block")  # whose scale is exact enough
    assert not verify(tmp_path / "fp8", against=source).faults


def test_a_value_that_quantize_from_turns_into_inf_is_refused(tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "source", put(DOWN, float(np.finfo(np.float32).max), np.float32))
    with pytest.raises(FormatError) as caught:
        convert(source, tmp_path / "target", "fp8_block")
    assert str(caught.value) == (
        f"tensor '{DOWN}': 3.403e+38 overflows bfloat16, from which the contract quantizes; "
        "set quantize_from to a wider dtype, or keep its role"
    )


def test_columns_that_no_block_divides(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Array]) -> None:
        tensors[DOWN] = tensors[DOWN][:, :500]

    source = copy(QWEN3, tmp_path / "source", cut)
    message = (
        f"tensor '{DOWN}' of shape [256, 500]: mxfp8: K = 500 is not a multiple of 32; "
        "keep its role or choose another recipe"
    )
    with pytest.raises(PlanError) as caught:
        convert(source, tmp_path / "target", "mxfp8")
    assert str(caught.value).startswith(message.partition(": mxfp8")[0])
    assert str(caught.value).endswith("; keep its role or choose another recipe")
    assert not (tmp_path / "target").exists()


def without(name: str) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return lambda tensors: {other: array for other, array in tensors.items() if other != name}


def test_quantized_sources(tmp_path: Path) -> None:
    convert(QWEN3, tmp_path / "fp8", "fp8_block")
    message = f"tensor '{DOWN}' is already fp8_block; convert the checkpoint with --recipe bf16 first"
    refused(PlanError, message, tmp_path / "fp8", tmp_path / "target")
    lost = copy(tmp_path / "fp8", tmp_path / "lost", without(f"{DOWN}_scale_inv"))
    message = f"'{DOWN}' is fp8_block in deepseek_fp8, but its weight_scale_inv is missing"
    refused(CheckpointError, message, lost, tmp_path / "target", "bf16")
    nan = copy(tmp_path / "fp8", tmp_path / "nan", put(f"{DOWN}_scale_inv", np.nan))
    with pytest.raises(CheckpointError, match=f"tensor '{DOWN}' decodes to NaN or Inf; repair the source"):
        convert(nan, tmp_path / "target", "bf16")
    convert(nan, tmp_path / "target", "bf16", allow_nonfinite=True)
    assert np.isnan(load_folder(tmp_path / "target")[DOWN].astype(np.float32)).any()


def test_recipes_and_engines_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe 'mxpf8' \(did you mean 'mxfp8'\?\)"):
        convert(QWEN3, tmp_path / "target", "mxpf8")
    with pytest.raises(PlanError, match="the number of workers must be at least 1, not 0"):
        convert(QWEN3, tmp_path / "target", "mxfp8", workers=0)
    only = ['engines=["sglang"]']
    with pytest.raises(PlanError) as caught:
        convert(DEEPSEEK_V3, tmp_path / "target", "fp8_block", overrides=only)
    assert str(caught.value).startswith(
        "no engine of recipe 'fp8_block' could load the result (sglang: model.layers.0."
    )
    assert str(caught.value).endswith("; --force converts anyway")
    assert not (tmp_path / "target").exists()
    report = convert(DEEPSEEK_V3, tmp_path / "target", "fp8_block", overrides=only, force=True)
    assert report.conversion.unloadable
    assert json.loads((tmp_path / "target" / "lowprec.json").read_text())["unloadable"] is True
    assert not verify(tmp_path / "target", against=DEEPSEEK_V3).faults
    assert "no engine loads this: it was converted with --force" in inspect(tmp_path / "target").oddities


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
def test_a_config_cannot_make_us_count_for_ever(key: str, tmp_path: Path) -> None:
    source = copy(QWEN3_MOE, tmp_path / "source")
    edit_json(source / "config.json", **{key: 10**12})
    message = f"config.json: {key} = 1000000000000 is more than 100000, which no model has"
    refused(PlanError, message, source, tmp_path / "target")


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "source")
    for name in (b"\xff.json", b"a\nb.txt"):
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).write_text("x")
    layout = convert(source, tmp_path / "target", "mxfp8").conversion.layout
    assert {(item.name, item.reason) for item in layout.left_out} == {
        ("\\udcff.json", "its name is not printable"),
        ("a\\nb.txt", "its name is not printable"),
    }
    assert not verify(tmp_path / "target", against=source).faults


# ---- anything else ----------------------------------------------------------------------------------------------


def test_only_our_errors_escape_from_damaged_sources(tmp_path: Path) -> None:
    """A few hundred changes of one to three bytes in every file that is read."""
    source = split(QWEN3_MOE, tmp_path / "source", lambda name: len(name) % 2, 2)
    convert(QWEN3, tmp_path / "nvfp4", "nvfp4")
    chosen = random.Random(3)
    for folder in (source, tmp_path / "nvfp4"):
        originals = {path: path.read_bytes() for path in sorted(folder.iterdir())}
        for _ in range(150):
            path = chosen.choice(list(originals))
            data = bytearray(originals[path])
            limit = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
            for _ in range(chosen.randrange(1, 4)):
                data[chosen.randrange(limit)] = chosen.choice([*b'0123456789{}[]",:null', chosen.randrange(256)])
            path.write_bytes(data)
            for work in (inspect, partial(explain, recipe="bf16"), verify):
                with contextlib.suppress(LowprecError):
                    work(folder)
            path.write_bytes(originals[path])
