"""The checkpoints that tests and the demo are made of: real, deterministic, loadable."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import folders
import make_checkpoint as maker
import numpy as np
import pytest
import sample_models as sample

from lowprec.contract import resolve
from lowprec.converters.family import find_family
from lowprec.plan import Action, build_plan
from lowprec.recipe import load_recipe


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "deepseek"
    return maker.make_checkpoint("deepseek_v3", target, layers=2, mtp=2, experts=4, split_partners=True, shards=3)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", maker.KINDS)
def test_every_kind_is_a_model_of_its_family(kind: str, ragged: bool, tmp_path: Path) -> None:
    folder = maker.make_checkpoint(kind, tmp_path / "x", layers=3, experts=4, ragged=ragged, tokenizer=False)
    tensors = folders.load_folder(folder)
    model = find_family(kind).model(config(folder), tensors)
    assert (model.model_type, model.num_layers) == (kind, 3)
    assert model.num_mtp_layers == (kind == "deepseek_v3")
    assert sum(array.nbytes for array in tensors.values()) < 20e6
    sources = [sample.source(name, array.shape) for name, array in tensors.items()]
    for recipe in ("fp8_block", "mxfp8", "nvfp4"):  # 32 divides every K, so that all formats fit
        plan = build_plan(resolve(load_recipe(recipe, ["policy.last=0"]), model), find_family(kind), sources)
        shapes = [step.source.shape for step in plan.steps if step.action is Action.QUANTIZE]
        assert shapes
        aligned = all(size % 128 == 0 for shape in shapes for size in shape)
        assert aligned is not ragged
    router_bias = {array.dtype.name for name, array in tensors.items() if name.endswith("e_score_correction_bias")}
    assert router_bias == ({"float32"} if kind in ("deepseek_v3", "kimi_k2") else set())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_transformers_loads_exactly_these_weights(kind: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = maker.make_checkpoint(kind, tmp_path / "x", layers=2, experts=4)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    model.save_pretrained(tmp_path / "again")
    ours, theirs = folders.load_folder(folder), folders.load_folder(tmp_path / "again")
    assert {name: array.tobytes() for name, array in ours.items()} == {
        name: array.tobytes() for name, array in theirs.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Any text: ß, 字, \n 7!"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


def test_mtp_layers_load_in_transformers(deepseek: Path) -> None:
    """The names that we add by hand are those under which transformers' own MTP model finds its weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    main = AutoModelForCausalLM.from_pretrained(deepseek)
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]  # as the class has it for 61 layers
    loaded = MtpModel.from_pretrained(main).state_dict()
    tensors = folders.load_folder(deepseek)
    for layer in (0, 1):
        prefix = f"layers.{layer}."
        for ours, theirs in (("eh_proj", "eh_proj"), ("shared_head.norm", "post_norm"), ("enorm", "enorm")):
            expected = tensors[f"model.layers.{layer + 2}.{ours}.weight"].view(np.uint16)
            assert np.array_equal(loaded[f"{prefix}{theirs}.weight"].view(torch.uint16).numpy(), expected)
        block = prefix + "mtp_block.mlp.experts.gate_up_proj"
        gate = tensors[f"model.layers.{layer + 2}.mlp.experts.1.gate_proj.weight"].view(np.uint16)
        assert np.array_equal(loaded[block][1].view(torch.uint16).numpy()[: len(gate)], gate)


def test_shards_and_index(deepseek: Path, tmp_path: Path) -> None:
    files = sorted(path.name for path in deepseek.glob("*.safetensors"))
    assert files == [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    index = json.loads((deepseek / folders.INDEX).read_text())
    per_file = {name: set(folders.load(deepseek / name)) for name in files}
    assert {name: file for file, names in per_file.items() for name in names} == index["weight_map"]
    tensors = folders.load_folder(deepseek)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    split = [
        name for name in tensors
        if (up := re.sub("gate_proj.weight$", "up_proj.weight", name)) != name
        and index["weight_map"][name] != index["weight_map"][up]
    ]  # fmt: skip
    assert len(split) > 10
    whole = maker.make_checkpoint("deepseek_v3", tmp_path / "x", layers=2, mtp=2, experts=4, shards=1)
    assert not (whole / folders.INDEX).exists()
    one = folders.load_folder(whole)
    assert {name: array.tobytes() for name, array in one.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }


def test_same_call_same_bytes(tmp_path: Path) -> None:
    def make(name: str, **options: Any) -> dict[str, bytes]:
        return folders.tree(maker.make_checkpoint("qwen3_moe", tmp_path / name, layers=2, experts=4, **options))

    first = make("a")
    assert make("b") == first
    other = make("c", seed=1)
    assert other.keys() == first.keys()
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith(".safetensors")}


def test_weights_have_the_spread_that_quantizers_meet() -> None:
    """Rows of different size, a column that is larger, and elements far out: a formula error shows."""
    values = maker.tensor(maker.Spec(kind="qwen3"), "x.weight", (512, 256)).astype(np.float64)
    rows = np.median(np.abs(values), axis=1)
    columns = np.median(np.abs(values), axis=0)
    assert 0.2 < np.log(rows).std() < 0.3
    assert (columns > 3 * np.median(columns)).sum() == 1
    assert (np.abs(values) > 10 * rows[:, None]).sum() >= 20
    assert 0.01 < values.std() < 0.05


@pytest.mark.parametrize(
    ("options", "said"),
    [({"kind": "gpt2"}, "kind must be one of"), ({"dtype": "int8"}, "and dtype one of"), ({}, "is not empty")],
)
def test_wrong_calls(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=said):
        maker.make_checkpoint(**{"kind": "qwen3", "target": tmp_path, **options})


def test_command(tmp_path: Path) -> None:
    command = [sys.executable, maker.__file__, "qwen3", str(tmp_path / "x")]
    options = ["--layers", "1", "--tie", "--dtype", "float32", "--shards", "1", "--no-tokenizer", "--ragged"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    tensors = folders.load_folder(tmp_path / "x")
    assert {array.dtype.name for array in tensors.values()} == {"float32"}
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].shape == (500, 288)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "is not empty" in again.stderr
