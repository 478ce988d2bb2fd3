"""Convert a trained model and two generated ones under every recipe, verify each result, and show one table.

    python tools/demo.py [DIR]

It uses the `lowprec` command as a person would: convert, verify --against, and convert --recipe bf16 of the result,
which gives the weights that an engine computes with; transformers loads those for the perplexity.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fetch_smollm2 import save_smollm2
from make_checkpoint import make_checkpoint
from rich import box
from rich.console import Console
from rich.table import Table

# What a perplexity is computed on; nothing depends on the words, only on their being the same everywhere.
TEXT = """A lighthouse stands on the cliff above the village. Every evening the keeper climbs the stairs, trims the
lamp and writes the weather into a book. In winter the wind is strong, and the boats stay in the harbour until the
sea is calm again. The children learn to read the sky: when the clouds are red in the morning, it will rain before
noon; when the swallows fly low, a storm is near. Most people in the village work on the sea, but some keep sheep and
bees on the hills. On market days they bring cheese, wool and honey to the square, and in the summer visitors come by
train to walk along the coast and to swim in the small bay behind the church."""

MODELS: dict[str, Callable[[Path], Any]] = {
    "SmolLM2-135M": save_smollm2,
    "Qwen3-MoE (random)": partial(make_checkpoint, "qwen3_moe", layers=6, experts=16),
    "DeepSeek-V3 (random)": partial(make_checkpoint, "deepseek_v3", layers=6, experts=16),
}
NOTES = """
time, peak: of the whole command. SQNR: of the worst role. ppl: perplexity of a
fixed text; with random weights it is about the size of the vocabulary whatever
is done to them, and only shows that they load.
"""

USAGE = 2  # exit code of `lowprec` where a recipe is not for a model
RECIPES = (
    "fp8_block",
    "fp8_block_ue8m0",
    "mxfp8",
    "nvfp4",
    "nvfp4_experts",
    "mxfp4_dense",
    "mxfp4_mxfp8",
    "int4_experts",
)


class Failed(Exception):
    """A command of the demo did not do what it must."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One conversion, measured.

    seconds, peak_memory (bytes): of the whole `convert` command. sqnr_db: of the worst role. perplexity: on TEXT, of
    the source and of the served weights. forced: the flag it took because no engine loads the result.
    """

    model: str
    recipe: str
    bytes_before: int
    bytes_after: int
    seconds: float
    peak_memory: int
    sqnr_db: float
    perplexity_before: float
    perplexity: float
    loads: tuple[str, ...]
    forced: str

    @property
    def place(self) -> str:
        """Name of the model's folder."""
        return place_of(self.model)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of one command. peak_memory: its largest resident size in bytes."""

    code: int
    output: str
    error: str
    seconds: float
    peak_memory: int

    def json(self) -> Any:
        """The JSON document that it printed."""
        return json.loads(self.output)


def place_of(model: str) -> str:
    """Name of a model's folder: its first word."""
    return model.partition(" ")[0]


# Runs a command and writes its seconds and KiB of memory into the file that the first argument names. Linux counts what
# the parent held as the child's too, so the parent that measures must be small, which a test with torch loaded is not.
LAUNCHER = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.call(sys.argv[2:])
seconds = time.perf_counter() - start
with open(sys.argv[1], "w") as file:
    print(seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=file)
sys.exit(code)
"""


def lowprec(*words: str | Path) -> Done:
    """Run the `lowprec` command that stands beside this Python."""
    command = [str(Path(sys.executable).with_name("lowprec")), *map(str, words)]
    with tempfile.NamedTemporaryFile("r") as usage:
        launch = [sys.executable, "-c", LAUNCHER, usage.name, *command]
        process = subprocess.run(launch, check=False, capture_output=True)
        seconds, kibibytes = usage.read().split()
    return Done(
        code=process.returncode,
        output=process.stdout.decode(),
        error=process.stderr.decode(),
        seconds=float(seconds),
        peak_memory=int(kibibytes) * 1024,
    )


def must(*words: str | Path) -> Done:
    """Run the `lowprec` command. Raises Failed if it does not exit with 0."""
    done = lowprec(*words)
    if done.code:
        raise Failed(f"lowprec {' '.join(map(str, words))} exited with {done.code}: {done.error or done.output}")
    return done


class Elsewhere:
    """A process of its own for what needs torch: this one stays small, since a child's peak starts at its parent's."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_be_quiet)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def make(self, model: str, target: Path) -> None:
        """Write the model's checkpoint."""
        making = target.with_name("making")
        shutil.rmtree(making, ignore_errors=True)
        self._pool.submit(MODELS[model], making).result()
        making.rename(target)

    def perplexity(self, folder: Path) -> float:
        """Perplexity of the checkpoint on TEXT."""
        return self._pool.submit(perplexity, folder).result()


def _be_quiet() -> None:
    os.environ["TQDM_DISABLE"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def perplexity(folder: Path) -> float:
    """Perplexity of a checkpoint that transformers loads, on TEXT, in BF16 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        return math.exp(model(tokens, labels=tokens).loss.item())


def measure(model: str, source: Path, recipe: str, folder: Path, elsewhere: Elsewhere, before: float) -> Row | None:
    """Convert, verify, decode and load one model under one recipe; None if the recipe is not for such a model.

    Raises:
        Failed: a command that must succeed did not.
    """
    target, served = folder / recipe, folder / f"{recipe}-served"
    for old in (target, served):
        shutil.rmtree(old, ignore_errors=True)
    words = ("convert", source, target, "--recipe", recipe, "--json")
    done, forced = lowprec(*words), ""
    if done.code == USAGE:
        return None
    if done.code:
        done, forced = must(*words, "--force"), " --force"
    report = done.json()["conversion"]
    errors = must("verify", target, "--against", source, "--json").json()["errors"]
    must("convert", target, served, "--recipe", "bf16", "--quiet")
    row = Row(
        model=model,
        recipe=recipe,
        bytes_before=report["bytes_before"],
        bytes_after=report["bytes_after"],
        seconds=done.seconds,
        peak_memory=done.peak_memory,
        sqnr_db=min(float(item["sqnr_db"]) for item in errors),
        perplexity_before=before,
        perplexity=elsewhere.perplexity(served),
        loads=tuple(report["loads"]),
        forced=forced,
    )
    shutil.rmtree(served)
    return row


def run(folder: Path, models: Sequence[str] = tuple(MODELS), recipes: Sequence[str] = RECIPES) -> Iterator[Row]:
    """Every model under every recipe that fits it, one row each."""
    with Elsewhere() as elsewhere:
        for model in models:
            place = folder / place_of(model)
            source = place / "bf16"
            if not (source / "config.json").exists():
                elsewhere.make(model, source)
            before = elsewhere.perplexity(source)
            for recipe in recipes:
                row = measure(model, source, recipe, place, elsewhere, before)
                if row is not None:
                    yield row


def table(rows: Sequence[Row]) -> Table:
    """The rows as one table, below a line for each model."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("model\n  recipe", no_wrap=True)
    for head in ("size\nMB", "of\nBF16", "time\ns", "peak\nMB", "SQNR\ndB", "ppl\nBF16", "ppl\nserved"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("engines that\nload it")
    for index, row in enumerate(rows):
        if index == 0 or row.model != rows[index - 1].model:
            if index:
                shown.add_row()
            shown.add_row(f"[bold]{row.model}", f"{row.bytes_before / 1e6:.1f}")
        shown.add_row(
            f"  {row.recipe}",
            f"{row.bytes_after / 1e6:.1f}",
            f"{row.bytes_after / row.bytes_before:.3f}",
            f"{row.seconds:.1f}",
            f"{row.peak_memory / 1e6:.0f}",
            f"{row.sqnr_db:.1f}",
            f"{row.perplexity_before:.1f}",
            f"{row.perplexity:.1f}",
            ", ".join(row.loads) or "no engine loads this",
        )
    return shown


def main(arguments: Sequence[str]) -> int:
    """Run everything below the folder that is given, or ./demo."""
    folder = Path(arguments[0] if arguments else "demo")
    out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 100)
    rows = []
    try:
        for row in run(folder):
            place = folder / row.place
            out.print(f"$ lowprec convert {place}/bf16 {place}/{row.recipe} --recipe {row.recipe}{row.forced}")
            out.print(f"  {row.seconds:.1f} s; verified against its source; decoded again and loaded by transformers")
            rows.append(row)
    except Failed as error:
        out.print(f"demo: error: {error}", markup=False)
        return 1
    out.print()
    out.print(table(rows), soft_wrap=False)
    out.print(NOTES)
    out.print(f"Look around: lowprec inspect {folder}/Qwen3-MoE/nvfp4_experts, lowprec recipes, lowprec --help")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
