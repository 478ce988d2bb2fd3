"""The command as a person meets it: exit codes, one-line errors, pure JSON, pipes, interruption, start-up time."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from lowprec import backends
from lowprec.cli import cli, main, parse_size
from lowprec.recipe import list_recipes, recipe_text

MODELS = Path(__file__).parent / "data" / "megatron"
COMMAND = Path(sys.executable).with_name("lowprec")
HEAVY = ("torch", "transformers", "compressed_tensors", "safetensors")


@pytest.fixture
def source() -> Path:
    """A Qwen3-MoE of three layers, as transformers saved it."""
    return MODELS / "qwen3_moe" / "hf"


def run(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, cwd=cwd, check=False)


def on_terminal(words: Sequence[str | Path], columns: int, program: str | Path = COMMAND) -> tuple[int, str]:
    """Exit code and everything shown when the program runs on a terminal that is so wide."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS=str(columns), LINES="50", TERM="xterm-256color")
        os.execv(program, [str(program), *map(str, words)])
    shown = b""
    while select.select([master], [], [], 60)[0]:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux reports the other end's closing so
            break
        if not part:
            break
        shown += part
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def lines_of(shown: str) -> list[str]:
    """The lines of a terminal's output without its control sequences; a line that is drawn again is one more."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error; nothing else may be there."""
    assert done.stdout == ""
    assert done.stderr.startswith("lowprec: error: ")
    assert done.stderr.endswith("\n")
    assert done.stderr.count("\n") == 1
    return done.stderr


# -- start-up ----------------------------------------------------------------------------------------------------


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        done = run("--help")
        assert done.returncode == 0
        assert "convert" in done.stdout
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.3


def loaded_by(*words: str | Path) -> set[str]:
    """Top-level modules in memory after one command ran in a fresh interpreter."""
    script = (
        "import sys\nfrom lowprec.cli import main\ncode = main(sys.argv[1:])\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED ")[2].split())


def test_help_loads_nothing_of_weight() -> None:
    assert not {"numpy", "rich", "asyncio", *HEAVY} & loaded_by("--help")


def test_no_command_imports_torch(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert not set(HEAVY) & loaded_by("recipes")
    assert not set(HEAVY) & loaded_by("explain", source, "--recipe", "mxfp8")
    assert not set(HEAVY) & loaded_by("convert", source, target, "--recipe", "mxfp8")
    assert not set(HEAVY) & loaded_by("verify", target, "--against", source)
    assert not set(HEAVY) & loaded_by("inspect", target)


# -- the command line is wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("convrt",), "did you mean 'convert'?"),
        (("zzz",), "known: convert, doctor, explain, inspect, recipes, verify"),
        (("--versio",), "Did you mean '--version'?"),
        (("convert", "a", "b", "--recipe", "mxfp8", "--max-shardsize", "1"), "--max-shard-size"),
        (("convert", "a"), "Missing argument 'DST'; see 'lowprec convert --help'"),
        (("explain", "a"), "Missing option '--recipe'"),
        (("convert", "a", "b", "-r", "mxfp8", "--workers", "0"), "--workers"),
        (("convert", "a", "b", "-r", "mxfp8", "--max-shard-size", "5 parsecs"), "is not a size such as 5GB"),
        (("explain", "a", "-r", "mxfp8", "--dtype", "bf16"), "bfloat16"),
        (("recipes", "nvfp4_expert"), "did you mean 'nvfp4_experts'?"),
        (("recipes", "a", "b"), "unexpected extra argument"),
    ],
)
def test_usage_errors(words: tuple[str, ...], part: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert part in error_line(done)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--recipe", "mxfp9"), "did you mean 'mxfp8'?"),
        (("--recipe", "mxfp8", "--engine", "vlm"), "did you mean 'vllm'?"),
        (("--recipe", "no/such.toml"), "no/such.toml"),
        (("--recipe", "mxfp8", "--set", "policy.lst=0"), "did you mean 'last'?"),
        (("--recipe", "mxfp8", "--set", "dialect=mxfp8"), "recipe 'mxfp8': unknown dialect 'mxfp8'"),
        (("--recipe", "mxfp8", "--set", "policy.last"), "must look like policy.last=0"),
        (("--recipe", "mxfp4_dense", "--set", 'rules.0.roles=["mla.kv_up"]'), "matches no tensor"),
    ],
)
def test_recipe_errors_are_usage(source: Path, tmp_path: Path, words: tuple[str, ...], part: str) -> None:
    for command in (("explain", source), ("convert", source, tmp_path / "out")):
        done = run(*command, *words)
        assert done.returncode == 2
        assert part in error_line(done)
    assert list(tmp_path.iterdir()) == []


def test_failures_exit_with_one(tmp_path: Path) -> None:
    for words in (("inspect", "gone"), ("verify", "gone"), ("explain", "gone", "-r", "mxfp8")):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 1
        assert "gone" in error_line(done)


# -- what is shown -------------------------------------------------------------------------------------------------


def test_no_arguments_is_help() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("--help").stdout


def test_recipes_are_listed_and_printed() -> None:
    table = run("recipes").stdout
    for name in list_recipes():
        assert re.search(rf"^{name}  ", table, re.MULTILINE)
        assert run("recipes", name).stdout == recipe_text(name)


def test_a_printed_recipe_is_a_recipe(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(run("recipes", "mxfp8").stdout)
    ours, theirs = (json.loads(run("explain", source, "-r", name, "--json").stdout) for name in ("mxfp8", str(own)))
    assert ours["digest"] == theirs["digest"]


def test_doctor_names_every_backend_and_why() -> None:
    rows = json.loads(run("doctor", "--json").stdout)
    assert [row["name"] for row in rows] == [item.name for item in backends.status()]
    shown = run("doctor").stdout
    for row in rows:
        active = "yes" if row["active"] else "no"
        assert re.search(rf"^{row['name']} +{active} .*{re.escape(row['detail'])}$", shown, re.MULTILINE)


def test_explain_in_a_pipe_is_one_line_a_tensor(source: Path) -> None:
    done = run("explain", source, "--recipe", "nvfp4_experts")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    plan = json.loads(run("explain", source, "--recipe", "nvfp4_experts", "--json").stdout)
    for tensor in plan["tensors"]:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{tensor['name']} ")]
        form = tensor["format"]
        for word in (tensor["role"], form if isinstance(form, str) else form["format"], tensor["reason"]):
            assert word in line
    for engine in plan["loads"]:
        assert engine in done.stdout
    assert plan["digest"] in done.stdout


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["recipes", "explain", "convert", "verify", "inspect"])
def test_a_terminal_of_common_width_holds_the_tables(source: Path, tmp_path: Path, command: str, columns: int) -> None:
    target = tmp_path / "out"
    if command in ("verify", "inspect"):
        assert run("convert", source, target, "-r", "nvfp4_experts").returncode == 0
    words = {
        "recipes": (),
        "explain": (source, "-r", "nvfp4_experts"),
        "convert": (source, target, "-r", "nvfp4_experts"),
        "verify": (target, "--against", source),
        "inspect": (target,),
    }
    code, shown = on_terminal((command, *words[command]), columns)
    assert code == 0, shown
    assert max(map(len, lines_of(shown))) <= columns
    if command == "explain":
        row = r"mlp\.experts\.\*\.gate_proj(\.weight)? +experts\.gate +0-1 +(8 +)?nvfp4 +rules\.0"
        assert any(re.match(row, line) for line in lines_of(shown))


@pytest.mark.parametrize("command", ["explain", "convert", "verify", "inspect"])
def test_json_is_pure(source: Path, tmp_path: Path, command: str) -> None:
    target = tmp_path / "out"
    assert run("convert", source, target, "-r", "fp8_block").returncode == 0
    words = {
        "explain": (source, "-r", "fp8_block"),
        "convert": (source, tmp_path / "other", "-r", "fp8_block"),
        "verify": (target, "--against", source),
        "inspect": (target,),
    }
    done = run(command, *words[command], "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert isinstance(json.loads(done.stdout), dict)


def test_progress_goes_to_standard_error_of_a_terminal_alone(source: Path, tmp_path: Path) -> None:
    assert run("convert", source, tmp_path / "piped", "-r", "mxfp8").stderr == ""
    _, shown = on_terminal(("convert", source, tmp_path / "seen", "-r", "mxfp8"), 120)
    assert any(re.match(r"(convert|publish) .* 3\.9/3\.9 MB +[\d.]+ MB/s +0:00:00", line) for line in lines_of(shown))
    _, shown = on_terminal(("convert", source, tmp_path / "quiet", "-r", "mxfp8", "--quiet"), 120)
    assert shown == ""


SLOW_JOB = """
import time
from lowprec import console
from lowprec.converters.report import Phase, Progress
with console.progress(quiet=False) as report:
    for done in (1, 2, 3):
        time.sleep(0.3)
        name = f"model.layers.{done}.mlp.experts.17.gate_proj.weight"
        report(Progress(phase=Phase.CONVERT, tensor=name, done_bytes=done * 10**6, total_bytes=4 * 10**6))
    time.sleep(0.3)
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_progress_shows_bytes_rate_time_left_and_tensor(columns: int) -> None:
    _, shown = on_terminal(("-c", SLOW_JOB), columns, program=sys.executable)
    seen = [
        line
        for line in lines_of(shown)
        if re.match(r"convert .* 2\.0/4\.0 MB +[\d.]+ MB/s +0:00:0\d +layers\.2\.mlp", line)
    ]
    assert seen, shown
    assert max(map(len, lines_of(shown))) <= columns


def test_dry_run_writes_nothing_and_shows_the_plan(source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "-r", "mxfp8", "--dry-run")
    assert done.stdout == run("explain", source, "-r", "mxfp8").stdout
    assert list(tmp_path.iterdir()) == []


def test_options_reach_the_library(source: Path, tmp_path: Path) -> None:
    done = run(
        *("convert", source, tmp_path / "out", "-r", "mxfp8", "--set", "policy.last=0", "--dtype", "float16"),
        *("--max-shard-size", "400kB", "--workers", "1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "lowprec.json").read_text())
    assert manifest["contract"]["policy"]["last"] == 0
    assert manifest["contract"]["dtype"] == "float16"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_what_an_engine_does_otherwise_is_said(source: Path) -> None:
    words = ("explain", source, "-r", "nvfp4")
    notes = json.loads(run(*words, "--json").stdout)["notes"]
    assert any("activations" in note for note in notes)
    shown = run(*words).stdout
    assert all(note in shown for note in notes)


def test_engine_chooses_the_spelling(source: Path, tmp_path: Path) -> None:
    words = ("convert", source, tmp_path / "out", "-r", "mxfp8", "--engine", "vllm", "--json")
    report = json.loads(run(*words).stdout)["conversion"]
    assert (report["dialect"], report["loads"]) == ("vllm_mxfp8", ["vllm"])
    back = json.loads(run("explain", source, "-r", "mxfp8", "--engine", "sglang", "--json").stdout)
    assert (back["dialect"], back["loads"]) == ("sglang_mxfp8", ["sglang"])
    assert run("explain", source, "-r", "mxfp8", "--engine", "").returncode == 2
    refused = run("explain", source, "-r", "nvfp4", "--engine", "transformers")
    assert refused.returncode == 1
    assert "transformers has no quantizer" in error_line(refused)


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("5GB", 5 * 10**9), ("1.5 gb", 15 * 10**8), ("2GiB", 2**31), ("7kB", 7000)]
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "0", "GB", "-1", "1TB5", "1e9", "5 parsecs", "9" * 400])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_size(text)


# -- things that happen while it runs ------------------------------------------------------------------------------


def test_verify_reports_faults_and_exits_with_one(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert run("convert", source, target, "-r", "mxfp8").returncode == 0
    (shard,) = target.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    done = run("verify", target, "--against", source)
    assert done.returncode == 1
    assert "fault" in done.stdout
    report = json.loads(run("verify", target, "--against", source, "--json").stdout)
    assert not report["ok"]
    assert report["faults"]


def test_a_closed_pipe_is_silent(source: Path) -> None:
    shell = f"set -o pipefail; {COMMAND} explain {source} -r mxfp8 | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert done.returncode in (0, 141)
    closed = subprocess.run(["bash", "-c", f"{COMMAND} recipes | true"], capture_output=True, text=True, check=False)
    assert closed.stderr == ""


def test_interruption_says_how_to_go_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("lowprec.converters.api.convert", interrupted)
    assert main(["convert", str(source), str(tmp_path / "out"), "-r", "mxfp8"]) == 130
    assert capsys.readouterr().err == "lowprec: error: interrupted; run the same command again to continue\n"


def test_a_bug_is_one_line_too(source: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on\npurpose")

    monkeypatch.setattr("lowprec.converters.api.inspect", broken)
    assert main(["inspect", str(source)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lowprec: error: a bug in lowprec: ZeroDivisionError: on purpose; ")
    assert error.count("\n") == 1
    for words in (["--debug", "inspect", str(source)], ["inspect", str(source), "--debug"]):
        assert main(words) == 1
        assert capsys.readouterr().err.startswith("Traceback")


def test_the_module_runs_too() -> None:
    done = subprocess.run([sys.executable, "-m", "lowprec", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == run("--version").stdout


def test_every_command_is_one_public_call() -> None:
    """Nothing can be done on the command line that cannot be done from Python under the same name."""
    import lowprec

    assert set(cli.commands) == {"convert", "explain", "inspect", "verify", "recipes", "doctor"}
    assert {"convert", "explain", "inspect", "verify"} <= set(lowprec.__all__)


def test_a_full_copy_of_the_source_is_untouched(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "in")
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    assert run("convert", copy, tmp_path / "out", "-r", "mxfp8").returncode == 0
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
