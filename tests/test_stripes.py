"""Stripes of any size, and both ways over a group of partners, give the bytes of whole tensors and the same errors."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_inputs import Model, make_input
from folders import DEEPSEEK_V3, MODEL, QWEN3, QWEN3_MOE, Array, copy, edit_json, encode, load, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowprec import convert, verify
from lowprec.backends import REFERENCE
from lowprec.converters import convert as converting
from lowprec.converters import flush, stripes
from lowprec.errors import CheckpointError, FormatError, LowprecError

RECIPES = {
    "fp8_block": QWEN3_MOE, "fp8_block_ue8m0": DEEPSEEK_V3, "mxfp8": DEEPSEEK_V3, "nvfp4": DEEPSEEK_V3,
    "nvfp4_experts": QWEN3_MOE, "mxfp4_dense": QWEN3, "mxfp4_mxfp8": QWEN3_MOE, "int4_experts": QWEN3_MOE,
}  # fmt: skip
ONE_PIECE = 1 << 40


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Each recipe's result, and back in BF16, with every tensor in one stripe."""
    folder = tmp_path_factory.mktemp("wholes")
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, ONE_PIECE, ONE_PIECE)
        for recipe, source in RECIPES.items():
            convert(source, folder / recipe, recipe, overrides=["policy.last=0"])
            convert(folder / recipe, folder / f"{recipe}-back", "bf16")
            assert not verify(folder / recipe, against=source).faults
    return {path.name: tree(path) for path in folder.iterdir()}


def set_sizes(patch: pytest.MonkeyPatch, stripe: int, cache: int) -> None:
    patch.setattr(converting, "StripeComputer", partial(stripes.StripeComputer, stripe=stripe, cache=cache))


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_byte_depends_on_stripes(
    recipe: str, wholes: dict[str, dict[str, bytes]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    stripe = data.draw(st.integers(6_000, 70_000), "stripe")
    cache = data.draw(st.sampled_from([0, 100_000, ONE_PIECE]), "cache")
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, stripe, cache)
        convert(RECIPES[recipe], folder / "a", recipe, overrides=["policy.last=0"], workers=2)
        convert(folder / "a", folder / "b", "bf16", workers=2)
    assert tree(folder / "a") == wholes[recipe]
    assert tree(folder / "b") == wholes[f"{recipe}-back"]


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4", "int4_experts"])
def test_without_compiled_kernels(recipe: str, wholes: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowprec.backends.AUTO", (REFERENCE,))
        set_sizes(patch, 30_000, 200_000)
        convert(RECIPES[recipe], tmp_path / "a", recipe, overrides=["policy.last=0"])
        convert(tmp_path / "a", tmp_path / "b", "bf16")
    assert tree(tmp_path / "a") == wholes[recipe]
    assert tree(tmp_path / "b") == wholes[f"{recipe}-back"]


K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def changed(values: dict[int, float], dtype: Any = None) -> Any:
    def change(tensors: dict[str, Array]) -> None:
        if dtype is not None:
            tensors[K_PROJ] = tensors[K_PROJ].astype(dtype)
        for at, value in values.items():
            tensors[K_PROJ].reshape(-1)[at] = value

    return change


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (changed({5: np.nan}), CheckpointError, f"'{K_PROJ}' holds NaN or Inf"),
        (changed({-1: -np.inf}), CheckpointError, f"'{K_PROJ}' holds NaN or Inf"),
        # The first stripe is refused for another reason than the tensor.
        (changed({0: 3.4e38, -1: np.nan}, np.float32), CheckpointError, f"'{K_PROJ}' holds NaN or Inf"),
        (changed({0: 3.397e38, -1: -3.4e38}, np.float32), FormatError, f"'{K_PROJ}': 3.4e\\+38 overflows bfloat16"),
    ],
)
@pytest.mark.parametrize("stripe", [4096, ONE_PIECE])
def test_errors_are_those_of_the_whole_tensor(
    recipe: str, change: Any, error: type[LowprecError], message: str, stripe: int, tmp_path: Path
) -> None:
    source = copy(QWEN3, tmp_path / "source", change)
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, stripe, 0)
        with pytest.raises(error, match=message):
            convert(source, tmp_path / "target", recipe, overrides=["policy.last=0"])


def test_a_result_that_would_be_infinite(tmp_path: Path) -> None:
    """The message names the largest value of all stripes; with an Inf that was allowed the tensor goes through."""
    largest = 3.3895313892515355e38  # of bfloat16
    source = copy(QWEN3, tmp_path / "source", changed({0: largest * 0.999, -1: largest}))
    infinite = copy(QWEN3, tmp_path / "infinite", changed({0: largest, -1: np.inf}))
    for stripe in (4096, ONE_PIECE):
        with pytest.MonkeyPatch.context() as patch:
            set_sizes(patch, stripe, 0)
            with pytest.raises(FormatError, match=r"its largest value 3\.39e\+38 decodes to Inf in mxfp8"):
                convert(source, tmp_path / f"a{stripe}", "mxfp8", overrides=["policy.last=0"])
            target = tmp_path / f"b{stripe}"
            convert(infinite, target, "mxfp8", overrides=["policy.last=0"], allow_nonfinite=True)
    assert tree(tmp_path / "b4096") == tree(tmp_path / f"b{ONE_PIECE}")


def test_files_are_synced_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sync after every write the result is the same, and an error of the disk is not lost."""
    synced: list[str] = []
    real = converting.Flusher
    monkeypatch.setattr(converting, "Flusher", partial(real, every=1))
    sync = flush.ShardWriter.sync

    def watch(writer: flush.ShardWriter) -> None:
        synced.append(writer.path.parent.name)
        sync(writer)

    monkeypatch.setattr(flush.ShardWriter, "sync", watch)
    convert(QWEN3, tmp_path / "a", "fp8_block")
    assert len(synced) > 1
    monkeypatch.setattr(converting, "Flusher", real)
    convert(QWEN3, tmp_path / "b", "fp8_block")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")

    def fail(writer: flush.ShardWriter) -> None:
        raise CheckpointError(f"'{writer.path}' cannot be written: Input/output error")

    monkeypatch.setattr(converting, "Flusher", partial(real, every=1))
    monkeypatch.setattr(flush.ShardWriter, "sync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        convert(QWEN3, tmp_path / "c", "fp8_block")
    assert not (tmp_path / "c" / "config.json").exists()


MEASURE = r"""
import re, sys, lowprec
source, target, recipe = sys.argv[1:]
lowprec.convert(source, target, recipe, overrides=["policy.last=0"], workers=2)
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_memory_does_not_grow_with_tensors(recipe: str, tmp_path: Path) -> None:
    """Weights of 105 MB, a group of 210: more than is kept. Whole tensors would take over 350 MB with two workers."""
    wide = Model(layers=1, hidden=256, heads=2, kv_heads=1, head_dim=128, intermediate=256, vocab=512, shards=1)
    source = tmp_path / "source"
    make_input(wide, source)
    rows = 204_800
    edit_json(source / "config.json", intermediate_size=rows)
    path = next(source.glob("*.safetensors"))
    tensors = load(path)
    for name in [name for name in tensors if ".mlp." in name]:
        shape = (256, rows) if "down_proj" in name else (rows, 256)
        tensors[name] = np.resize(tensors[name], shape)
    path.unlink()
    (source / "model.safetensors.index.json").unlink()
    (source / MODEL).write_bytes(encode(tensors))
    del tensors
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "target"), recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200 << 10, f"{int(done.stdout) >> 10} MiB"
