"""Targets that may not or cannot be written: one clear line, nothing lost, and the same command goes on later."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from folders import MODEL, QWEN3, QWEN3_MOE, copy, tree

from lowprec import convert, load_recipe, verify
from lowprec.converters.report import Phase, Progress
from lowprec.converters.staging import PARTIAL
from lowprec.errors import CheckpointError, LowprecError

RECIPE = "nvfp4"
REMEDY = "give a new or empty folder"


def refused(message: str, source: Path, target: Path) -> None:
    """convert refuses with exactly this line; what is there stays as it is."""
    roots = [path for path in (source, target) if path.is_dir()]
    before = [tree(root) for root in roots]
    was_there = target.exists()
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, RECIPE)
    assert str(caught.value) == message
    assert target.exists() == was_there
    assert [tree(root) for root in roots] == before


def test_source_and_target_must_be_apart(tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "a" / "source")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    same = f"source and target are the same folder '{source}'; give another target"
    for target in (source, tmp_path / "link", tmp_path / "up" / "a" / "source", source / "x" / ".."):
        refused(same, source, target)
    for target in (source / "new", source / "not" / "yet", tmp_path / "link" / "new", tmp_path / "up/a/source/new"):
        refused(f"target '{target}' lies inside the source '{source}'; give a folder elsewhere", source, target)
    for target in (tmp_path / "a", tmp_path / "up" / "a", tmp_path):
        refused(f"source '{source}' lies inside the target '{target}'; give a folder elsewhere", source, target)


def test_targets_that_are_not_ours(tmp_path: Path) -> None:
    file, other, copied = tmp_path / "file", tmp_path / "other", tmp_path / "copied"
    file.write_text("x")
    refused(f"target '{file}' is a file; give a folder", QWEN3, file)
    with pytest.raises(CheckpointError) as caught:
        convert(QWEN3, file / "target", RECIPE)
    assert str(caught.value) == f"'{file / 'target'}' cannot be read: Not a directory"
    for folder, name in ((other, "notes.txt"), (copied, "config.json")):
        folder.mkdir()
        (folder / name).write_text("precious")
        message = (
            f"target '{folder}' is not empty: '{name}' does not belong to this conversion; give a new or empty folder"
        )
        refused(message, QWEN3, folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    convert(QWEN3, empty, RECIPE)
    assert not verify(empty).faults


def test_targets_whose_path_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for target, reason in (
        (tmp_path / "loop" / "target", "Too many levels of symbolic links"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(CheckpointError) as caught:
            convert(QWEN3, target, RECIPE)
        assert str(caught.value) == f"'{target}' cannot be read: {reason}"


def test_a_foreign_file_in_an_unfinished_target(tmp_path: Path) -> None:
    def stop(item: Progress) -> None:
        raise KeyboardInterrupt(item.tensor)

    with pytest.raises(KeyboardInterrupt):
        convert(QWEN3, tmp_path / "t", RECIPE, progress=stop)
    (tmp_path / "t" / "mine.txt").write_text("precious")
    target = tmp_path / "t"
    message = (
        f"target '{target}' is not empty: 'mine.txt' does not belong to this conversion; give a new or empty folder"
    )
    refused(message, QWEN3, target)


def test_carried_files_named_like_those_of_an_unfinished_conversion(tmp_path: Path) -> None:
    source = copy(QWEN3, tmp_path / "source")
    names = ("lock", "state.json", "state.new", "journal.jsonl", "LOCK")
    for name in names:
        (source / name).write_text("precious")
    convert(source, tmp_path / "target", RECIPE)
    carried = {"lock", "state.json", "LOCK"}
    assert carried == {name for name in names if (tmp_path / "target" / name).exists()}
    assert not verify(tmp_path / "target", against=source).faults
    assert convert(source, tmp_path / "target", RECIPE).nothing_to_do


PLACES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a link to a folder": (lambda folder, mine: folder.symlink_to(mine.parent), ""),
    "a file": (lambda folder, mine: mine.rename(folder), ""),
    "a file in it": (lambda folder, mine: (folder.mkdir(), mine.rename(folder / "x")), "/x"),
    "a link for a shard": (lambda folder, mine: (folder.mkdir(), (folder / MODEL).symlink_to(mine)), f"/{MODEL}"),
    "a link for the journal": (
        lambda folder, mine: (folder.mkdir(), (folder / ".journal.jsonl").symlink_to(mine)),
        "/.journal.jsonl",
    ),
    "a pipe": (lambda folder, mine: (folder.mkdir(), os.mkfifo(folder / ".journal.jsonl")), "/.journal.jsonl"),  # noqa: ARG005
}


@pytest.mark.parametrize("case", PLACES)
def test_what_is_not_ours_in_the_place_of_the_partial_folder(case: str, tmp_path: Path) -> None:
    """We neither write through it nor remove it, and do not wait for a pipe."""
    place, name = PLACES[case]
    target, mine = tmp_path / "target", tmp_path / "mine" / "x"
    target.mkdir()
    mine.parent.mkdir()
    mine.write_text("precious")
    place(target / PARTIAL, mine)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        convert(QWEN3, target, RECIPE)
    assert str(caught.value) == (
        f"target '{target}' is not empty: '{PARTIAL}{name}' does not belong to this conversion; "
        "give a new or empty folder"
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert "precious" in {path.read_text() for path in before if path.is_file()}


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="the current folder cannot be read: No such file or directory"):
        convert(QWEN3, "target", RECIPE)


def test_a_finished_target_that_was_changed_is_not_nothing_to_do(tmp_path: Path) -> None:
    convert(QWEN3, tmp_path / "t", RECIPE)
    for name in (MODEL, "config.json", "generation_config.json", "hf_quant_config.json"):
        path = tmp_path / "t" / name
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        refused(
            f"target '{tmp_path / 't'}' was finished, but '{name}' is missing or was changed since; "
            "see lowprec verify, and delete the target to convert again",
            QWEN3,
            tmp_path / "t",
        )
        path.write_bytes(data)
    assert convert(QWEN3, tmp_path / "t", RECIPE).nothing_to_do


# ---- space ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(size: int, options: str = "") -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_little_space_is_seen_before_work_starts(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1 << 20)
    with pytest.raises(CheckpointError) as caught:
        convert(QWEN3_MOE, disk / "a" / "target", RECIPE)
    message = str(caught.value)
    assert message.startswith(f"target '{disk / 'a' / 'target'}' needs ")
    assert message.endswith(f" more bytes, but its file system has only {1 << 20} free")
    assert not tree(disk)


@pytest.mark.parametrize("reserve", [True, False])
def test_a_disk_that_fills_up_under_way(
    reserve: bool, small_disk: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shards' blocks reserved, the journal or the configs hit the wall; without, the tensors do."""
    convert(QWEN3_MOE, tmp_path / "whole", RECIPE)
    disk = small_disk(4 << 20)
    if not reserve:

        def unsupported(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "not supported")

        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    calls = iter(range(1000))

    def fill(item: Progress) -> None:
        if item.phase is Phase.CONVERT and next(calls) == 15:
            with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass

    target = disk / "target"
    with pytest.raises(CheckpointError) as caught:
        convert(QWEN3_MOE, target, RECIPE, workers=1, progress=fill)
    assert str(caught.value).endswith(
        "cannot be written: No space left on device; free some space and run the same command again, "
        "it continues where it stopped"
    )
    assert str(caught.value).startswith(f"'{target / PARTIAL}")
    assert not (target / "config.json").exists()
    (disk / "filler").unlink()
    report = convert(QWEN3_MOE, target, RECIPE)
    assert report.tensors_kept >= 16
    assert tree(target) == tree(tmp_path / "whole")


def test_the_space_of_an_earlier_run_counts(small_disk: Callable[[int], Path]) -> None:
    """What is reserved already is not asked for again: the disk has no second place for it."""
    disk = small_disk(3 << 20)

    def stop(item: Progress) -> None:
        raise KeyboardInterrupt(item.tensor)

    with pytest.raises(KeyboardInterrupt):
        convert(QWEN3_MOE, disk / "target", RECIPE, progress=stop)
    stats = os.statvfs(disk)
    assert stats.f_bavail * stats.f_frsize < 2_181_632  # the size of the result
    convert(QWEN3_MOE, disk / "target", RECIPE)
    assert not verify(disk / "target").faults


def in_child(prepare: Callable[[], object], source: Path, target: Path) -> str:
    """What convert says in a fork that may do less; empty if it is done."""
    recipe = load_recipe(RECIPE)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            convert(source, target, recipe)
        except BaseException as error:
            os.write(writer, f"{'' if isinstance(error, LowprecError) else repr(error)}{error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        message = file.read()
    os.waitpid(child, 0)
    return message


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    message = in_child(limit, QWEN3, tmp_path / "target")
    assert message == (
        f"'{tmp_path / 'target' / PARTIAL / MODEL}' cannot be written: File too large; free some space and run the "
        "same command again, it continues where it stopped"
    )
    convert(QWEN3, tmp_path / "target", RECIPE)
    assert not verify(tmp_path / "target").faults


# ---- permissions ------------------------------------------------------------------------------------------------


def test_a_target_on_a_read_only_file_system(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(8 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    target = disk / "target"
    refused(f"'{target}' cannot be written: Read-only file system", QWEN3, target)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that anybody may enter; pytest locks its own to everybody else whenever another pytest starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def test_sources_and_targets_without_permission(public_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    convert(QWEN3, public_path / "warm", RECIPE)  # loads what the child could not
    source = copy(QWEN3, public_path / "source")
    locked = public_path / "locked"
    locked.mkdir(mode=0o755)
    opened = public_path / "open"
    opened.mkdir()
    opened.chmod(0o777)

    def say(target: Path) -> str:
        return in_child(become_nobody, source, target)

    assert say(locked / "target") == f"'{locked / 'target'}' cannot be written: Permission denied"
    assert not list(locked.iterdir())
    (source / MODEL).chmod(0)
    assert say(opened / "target") == f"'{source / MODEL}' cannot be read: Permission denied"
    (source / MODEL).chmod(0o644)
    source.chmod(0)
    assert say(opened / "target") == f"'{source}' cannot be read: Permission denied"
    source.chmod(0o755)
    assert not list(opened.iterdir())
    assert say(opened / "target") == ""
    assert not verify(opened / "target", against=source).faults
