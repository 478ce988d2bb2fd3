"""Time `lowprec convert` as a process, from start to exit, beside `cp` of the same files.

    python tools/bench_convert.py [--inputs dense moe] [--recipes ...] [--linear] [--peers PYTHON] [--json FILE]

The inputs are those of bench_inputs.py. In every run each recipe comes directly after a `cp`, page cache warm; what is
shown is the median and the range. `goal` is what the conversion may take: cp + 0.7 s, or for NVFP4 1.2 cp + 0.7 s.
convert waits until its result is on the disk, cp does not. `--linear` shows 0.5, 1, 2 and 4 GB. `--peers` runs what is
installed for another interpreter (bench_peers.py); the ratio is that of conversion times without imports on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_peers
import numpy as np
from bench_inputs import DENSE, MOE, Model, dense_of, make_input
from bench_kernels import processor

import lowprec

ALL, DEFAULT = "policy.last=0", ""
CASES = {
    "dense": [
        *((recipe, ALL) for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense")),
        *((recipe, DEFAULT) for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense")),
    ],
    "moe": [(recipe, ALL) for recipe in ("fp8_block", "mxfp8", "nvfp4", "mxfp4_dense")],
}
SLACK = 0.7  # seconds that are allowed beside cp
ALLOWED = {"nvfp4": 1.2}  # times cp; 1 for the others
LINEAR = (0.5, 1.0, 2.0, 4.0)
TINY = Model(layers=3, hidden=256, heads=2, kv_heads=1, head_dim=128, intermediate=256, vocab=512)
TINY_MOE = Model(
    layers=3, hidden=256, heads=2, kv_heads=2, head_dim=128, intermediate=128, vocab=512, experts=4, tied=False
)
WITHIN = """
import sys, time
import lowprec.converters.api as api
begin = time.perf_counter()
api.convert(sys.argv[1], sys.argv[2], sys.argv[3], overrides=sys.argv[5:], workers=int(sys.argv[4]))
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; seconds. cpu: of the conversion's threads together, which other load changes least."""

    input: str
    bytes: int
    recipe: str
    setting: str
    wall: float
    fastest: float
    slowest: float
    cpu: float
    cp: float
    goal: float
    peak_rss: int
    load: float

    @property
    def met(self) -> bool:
        """Whether the goal was met."""
        return self.wall <= self.goal


@contextlib.contextmanager
def removed(path: Path) -> Iterator[Path]:
    """A path where nothing is, before and after."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def timed(command: Sequence[str]) -> tuple[float, float, int]:
    """Seconds until a process ended, of processor, and its bytes of memory at most. Raises CalledProcessError."""
    begin = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def converts(source: Path, target: Path, recipe: str, setting: str, workers: int) -> list[str]:
    """The command line."""
    command = [sys.executable, "-m", "lowprec", "convert", str(source), str(target), "--recipe", recipe, "--quiet"]
    return [*command, "--workers", str(workers), *(["--set", setting] if setting else [])]


def made(model: Model, folder: Path) -> int:
    """`make_input` in another process: what it takes of memory would count for every process started later."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(make_input, model, folder).result()


def warm(folder: Path) -> None:
    """Read every file, so that it is in the page cache."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def measure(name: str, source: Path, size: int, cases: Sequence[tuple[str, str]], args: Any) -> list[Row]:
    """Every case `runs` times, each time after a cp of its own."""
    copies: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    walls: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    works: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    memory = dict.fromkeys(cases, 0)
    begin = os.getloadavg()[0]
    for _ in range(args.runs):
        for case in cases:
            warm(source)
            with removed(args.folder / "copy") as copy:
                copies[case].append(timed(["cp", "-r", str(source), str(copy)])[0])
            with removed(args.folder / "target") as target:
                seconds, cpu, peak = timed(converts(source, target, *case, args.workers))
            walls[case].append(seconds)
            works[case].append(cpu)
            memory[case] = max(memory[case], peak)
    rows = []
    for case in cases:
        cp = statistics.median(copies[case])
        rows.append(
            Row(
                input=name,
                bytes=size,
                recipe=case[0],
                setting=case[1],
                wall=statistics.median(walls[case]),
                fastest=min(walls[case]),
                slowest=max(walls[case]),
                cpu=statistics.median(works[case]),
                cp=cp,
                goal=ALLOWED.get(case[0], 1.0) * cp + SLACK,
                peak_rss=memory[case],
                load=begin,
            )
        )
        show(rows[-1])
    return rows


def show(row: Row) -> None:
    """Print one line."""
    what = f"{row.input} {row.bytes / 1e9:.2f} GB, {row.recipe} {row.setting}"
    print(
        f"{what:42s} {row.wall:6.2f} s ({row.fastest:.2f}-{row.slowest:.2f}) cpu {row.cpu:.2f} s  cp {row.cp:5.2f} s  "
        f"goal {row.goal:5.2f} s {'met' if row.met else 'MISSED':7s}{row.peak_rss / 1e9:5.2f} GB",
        flush=True,
    )


def within(source: Path, recipe: str, args: Any) -> float:
    """Median seconds of a conversion without the start of the process and its imports."""
    seconds = []
    for _ in range(args.runs):
        with removed(args.folder / "target") as target:
            command = [sys.executable, "-c", WITHIN, str(source), str(target), recipe, str(args.workers), ALL]
            seconds.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return statistics.median(seconds)


def peers(source: Path, size: int, args: Any) -> list[dict[str, Any]]:
    """Every peer that is installed for the other interpreter, once, and how many times longer it takes than we do."""
    ours: dict[str, float] = {}
    found = []
    for peer, recipe in bench_peers.PEERS:
        with removed(args.folder / "target") as target:
            command = [args.peers, bench_peers.__file__, peer, recipe, str(source), str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            print(f"{peer} {recipe}: not run: {reason}", flush=True)
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        if recipe not in ours:
            ours[recipe] = within(source, recipe, args)
        record |= {"peer": peer, "recipe": recipe, "ours": ours[recipe], "ratio": record["seconds"] / ours[recipe]}
        speed = size / record["seconds"] / 1e6
        print(
            f"{peer} {record['version']} {recipe}: {record['seconds']:.2f} s, {speed:.0f} MB/s, "
            f"{record['peak_rss'] / 1e9:.2f} GB; ours {ours[recipe]:.2f} s, {record['ratio']:.1f} times faster",
            flush=True,
        )
        found.append(record)
    return found


def parse(arguments: Sequence[str] | None) -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where inputs are made and kept [default: one that is removed]")
    parser.add_argument("--inputs", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--recipes", nargs="+", help="only these")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--linear", action="store_true", help="also FP8 and NVFP4 of 0.5, 1, 2 and 4 GB")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter in whose environment peers are installed")
    parser.add_argument("--tiny", action="store_true", help="inputs of a few megabytes, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def run(args: Any) -> dict[str, Any]:
    """All that was asked for."""
    models = {"dense": TINY, "moe": TINY_MOE} if args.tiny else {"dense": DENSE, "moe": MOE}
    rows: list[Row] = []
    others: list[dict[str, Any]] = []
    for name in args.inputs:
        size = made(models[name], args.folder / name)
        cases = [case for case in CASES[name] if not args.recipes or case[0] in args.recipes]
        rows += measure(name, args.folder / name, size, cases, args)
        if args.peers and name == "dense":
            others = peers(args.folder / name, size, args)
    for gigabytes in LINEAR if args.linear else ():
        with removed(args.folder / "linear") as source:
            size = made(dense_of(gigabytes / (100 if args.tiny else 1)), source)
            rows += measure(f"{gigabytes:g}", source, size, [("fp8_block", ALL), ("nvfp4", ALL)], args)
    return {"rows": [asdict(row) | {"met": row.met} for row in rows], "peers": others}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse(arguments)
    temporary = None if args.folder else tempfile.TemporaryDirectory(prefix="bench_convert-")
    args.folder = Path(temporary.name) if temporary else args.folder
    versions = f"lowprec {lowprec.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{processor()}, {versions}, {args.workers} workers, median of {args.runs}, load {load}", flush=True)
    with temporary or contextlib.nullcontext():
        record = {"processor": processor(), "versions": versions, "workers": args.workers, "runs": args.runs}
        record |= run(args)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
