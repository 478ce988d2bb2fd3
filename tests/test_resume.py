"""Kill a conversion anywhere, run it again: the result is that of an uninterrupted run, byte for byte."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from folders import MODEL, QWEN3, QWEN3_MOE, copy, edit_json, split, tree

from lowprec import convert, verify
from lowprec.converters.report import Phase, Progress
from lowprec.converters.staging import PARTIAL
from lowprec.errors import CheckpointError, ContractError, LowprecError

RECIPE = "nvfp4"
WATCHED = ("open", "pwrite", "replace", "unlink", "rmdir", "ftruncate", "fsync", "posix_fallocate", "mkdir")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, partners apart, a tokenizer and a template folder."""
    folder = split(
        QWEN3_MOE,
        tmp_path_factory.mktemp("resume") / "source",
        lambda name: int("up_proj" in name or "k_proj" in name),
        2,
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The result of an uninterrupted run."""
    target = tmp_path_factory.mktemp("whole") / "target"
    convert(source, target, RECIPE, workers=2)
    return tree(target)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork; returns its status as the parent sees it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    return status


def die_at(call: int, torn: bool) -> Callable[[], int]:
    """Make the `call`-th call that changes a file system kill this process; torn: a write is half done first."""
    lock, seen = threading.Lock(), [0]

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with lock:
                seen[0] += 1
                if seen[0] == call:
                    if torn and name == "pwrite":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapper

    for name in WATCHED:
        setattr(os, name, watch(name, getattr(os, name)))
    return lambda: seen[0]


def dying_convert(source: Path, target: Path, call: int, *, torn: bool) -> None:
    die_at(call, torn)
    convert(source, target, RECIPE, workers=1)


def count_calls(source: Path, target: Path, folder: Path) -> int:
    def work() -> None:
        seen = die_at(-1, torn=False)
        convert(source, target, RECIPE, workers=1)
        (folder / "calls").write_text(str(seen()))

    assert in_child(work) == 0
    return int((folder / "calls").read_text())


def test_a_kill_before_any_system_call(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Every call near the beginning and the end, and a spread of those in the middle; then a second kill."""
    total = count_calls(source, tmp_path / "counted", tmp_path)
    assert total > 200
    middle = range(20, total - 50, (total - 70) // 12)
    chosen = random.Random(7)
    for call in [*range(1, 20, 2), *middle, *range(total - 50, total + 1)]:
        target = tmp_path / str(call)
        assert in_child(partial(dying_convert, source, target, call, torn=call % 2 == 0)) == signal.SIGKILL, call
        if call % 3 == 0:
            again = chosen.randrange(1, total)
            in_child(
                lambda target=target, again=again: (
                    die_at(again, torn=True),
                    convert(source, target, RECIPE, workers=1),
                )
            )
        if (target / "config.json").exists():
            assert verify(target).faults == () or (target / PARTIAL).exists(), call
        convert(source, target, RECIPE, workers=2)
        assert tree(target) == whole, call


SCRIPT = """
import sys, time, lowprec
source, target, recipe, pause = sys.argv[1:]
lowprec.convert(source, target, recipe, workers=2, progress=lambda item: time.sleep(float(pause)))
"""


def start(source: Path, target: Path, pause: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, str(source), str(target), RECIPE, str(pause)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_random_moments_until_it_is_done(
    kind: signal.Signals, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    chosen = random.Random(int(kind))
    kills = 0
    while kills < 8:
        before = len(journal(target))
        process = start(source, target, 0.004)
        deadline = time.monotonic() + 20
        # Wait until it works, so that the kill does not always hit the start of the interpreter.
        while process.poll() is None and len(journal(target)) == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chosen.uniform(0, 0.03))
        process.send_signal(kind)
        assert process.stderr is not None
        message = process.stderr.read().decode()
        kills += process.wait() != 0
        if kind is signal.SIGINT and not (target / "config.json").exists():
            assert "KeyboardInterrupt" in message
    convert(source, target, RECIPE, workers=2)
    assert tree(target) == whole


def journal(target: Path) -> list[bytes]:
    try:
        return (target / PARTIAL / ".journal.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []


class StopError(Exception):
    """Ends a run from its progress."""


def interrupt(source: Path, target: Path, after: int, recipe: str = RECIPE, **options: Any) -> None:
    """Run until `after` tensors are done."""
    done = iter(range(after))

    def progress(item: Progress) -> None:
        if next(done, None) is None:
            raise StopError(item.tensor)

    with pytest.raises(StopError):
        convert(source, target, recipe, workers=1, progress=progress, **options)


def test_what_is_kept_is_counted_and_not_done_again(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    interrupt(source, tmp_path, 20)
    phases: list[Phase] = []
    report = convert(source, tmp_path, RECIPE, progress=lambda item: phases.append(item.phase))
    assert (report.tensors_kept, report.tensors_redone) == (21, 0)
    assert phases.count(Phase.CHECK) == 21
    assert report.tensors_written == len(report.conversion.plan.steps) - 21
    assert 0 < report.bytes_read < report.conversion.bytes_before
    assert tree(tmp_path) == whole
    report = convert(source, tmp_path, RECIPE)
    assert report.nothing_to_do
    assert (report.tensors_written, report.bytes_read, report.bytes_written) == (0, 0, 0)
    assert tree(tmp_path) == whole


def test_a_partial_file_that_was_damaged_is_noticed(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    interrupt(source, tmp_path, 30)
    name = json.loads(journal(tmp_path)[3])["name"]
    for path in (tmp_path / PARTIAL).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        assert data != whole[path.name]  # not all of the file was written yet
        length = int.from_bytes(data[:8], "little")
        entry = json.loads(data[8 : 8 + length]).get(name)
        if entry is not None:
            data[8 + length + entry["data_offsets"][0]] ^= 1
            path.write_bytes(data)
    report = convert(source, tmp_path, RECIPE)
    assert report.tensors_redone == 1
    assert tree(tmp_path) == whole


@pytest.mark.parametrize("damage", ["torn", "garbage", "empty line", "missing", "header", "shorter", "removed"])
def test_damaged_staging_is_done_again(damage: str, source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    interrupt(source, tmp_path, 30)
    path = tmp_path / PARTIAL / ".journal.jsonl"
    shard = sorted((tmp_path / PARTIAL).glob("*.safetensors"))[0]
    match damage:
        case "torn":
            path.write_bytes(path.read_bytes()[:-20])
        case "garbage":
            path.write_bytes(b'{"name":1}\n[]\n\xff\n{"name":"x","source":{},"outputs":[1]}\n' + path.read_bytes())
        case "empty line":
            path.write_bytes(b"\n" + path.read_bytes() + b"\n")
        case "missing":
            path.unlink()
        case "header":
            shard.write_bytes(bytes(8) + shard.read_bytes()[8:])
        case "shorter":
            os.truncate(shard, shard.stat().st_size - 1)
        case "removed":
            shard.unlink()
    convert(source, tmp_path, RECIPE)
    assert tree(tmp_path) == whole


@pytest.mark.parametrize("finished", [False, True])
def test_another_contract_source_or_option_is_refused(finished: bool, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if finished:
        convert(source, target, RECIPE)
    else:
        interrupt(source, target, 5)
    before = tree(target)
    changed = split(QWEN3_MOE, tmp_path / "changed", lambda name: len(name) % 2, 2)
    cases: list[tuple[type[LowprecError], Callable[[], object], str]] = [
        (ContractError, lambda: convert(source, target, "mxfp8"), "under another contract: contract.backward.mode"),
        (
            ContractError,
            lambda: convert(source, target, RECIPE, overrides=["policy.last=0"]),
            "under another contract: contract.policy.last is 0 against 1; give another target, or delete this one",
        ),
        (CheckpointError, lambda: convert(changed, target, RECIPE), "from another source: source."),
        (
            CheckpointError,
            lambda: convert(source, target, RECIPE, max_shard_size=10**6),
            "with other options: options.max_shard_size is 1000000 against null",
        ),
    ]
    for kind, work, message in cases:
        with pytest.raises(kind) as caught:
            work()
        assert str(caught.value).startswith(f"'{target}' was made {message}")
        assert "\n" not in str(caught.value)
    assert tree(target) == before


def test_another_format_version_is_refused(source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "begun", 5)
    edit_json(tmp_path / "begun" / PARTIAL / ".state.json", format_version=0)
    with pytest.raises(CheckpointError, match="by a lowprec of another format version: format_version is 1 against 0"):
        convert(source, tmp_path / "begun", RECIPE)
    convert(source, tmp_path / "finished", RECIPE)
    path = tmp_path / "finished" / "lowprec.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1', b'"format_version":0'))
    with pytest.raises(CheckpointError, match="format_version is 0, this lowprec reads 1"):
        convert(source, tmp_path / "finished", RECIPE)


def test_a_source_whose_bytes_changed_is_refused(tmp_path: Path) -> None:
    """Size and header stay, so only the recorded checksum of the tensor can tell."""
    source = copy(QWEN3, tmp_path / "source")
    interrupt(source, tmp_path / "target", 10)
    name = json.loads(journal(tmp_path / "target")[0])["name"]
    data = bytearray((source / MODEL).read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]] ^= 1
    (source / MODEL).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "target", RECIPE)
    target = tmp_path / "target"
    assert str(caught.value) == f"tensor '{name}' of the source changed since '{target}' was begun; delete the target"


def test_two_runs_exclude_each_other(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    process = start(source, tmp_path, 0.05)
    while not journal(tmp_path):
        time.sleep(0.01)
    message = f"another run is writing to '{tmp_path}'; wait until it is done, or stop it"
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path, RECIPE)
    assert str(caught.value) == message
    process.kill()
    process.wait()
    # The dead run's lock is gone with it. Within one process runs exclude each other too.
    inner: list[str] = []

    def nested(_: Progress) -> None:
        if not inner:
            with pytest.raises(CheckpointError) as caught:
                convert(source, tmp_path, RECIPE)
            inner.append(str(caught.value))

    convert(source, tmp_path, RECIPE, progress=nested)
    assert inner == [message]
    assert tree(tmp_path) == whole


def test_many_runs_at_once_make_one_result(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Each ends well or is told of another; whoever loses leaves the winner's files alone."""
    for number in range(6):
        target = tmp_path / str(number)
        outcomes: list[str] = []

        def work(target: Path = target, outcomes: list[str] = outcomes) -> None:
            try:
                convert(source, target, RECIPE, workers=1)
                outcomes.append("done")
            except LowprecError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "done" in outcomes
        assert all(outcome == "done" or outcome.startswith("another run is writing to") for outcome in outcomes)
        assert tree(target) == whole
