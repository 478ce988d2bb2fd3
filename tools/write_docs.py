"""Keep what the documents say of the code true: examples, --help texts and the tree of files.

    python tools/write_docs.py [--check]

In README.md and docs/*.md it runs the commands of every ```console block (lines that begin with `$ `) in a folder where
`Qwen3-MoE` is a small checkpoint, and writes what they print below them. Between `<!-- tree -->` and `<!-- /tree -->`
it writes every file with the first line of its docstring, comment or description.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "megatron" / "qwen3_moe" / "hf"
COLUMNS = 100

_BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
_TREE = re.compile(r"(?<=<!-- tree -->\n)(.*?)(?=<!-- /tree -->)", re.DOTALL)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
# What differs from run to run.
_TIME = re.compile(r"\d+\.\d s\b")

_FILES = ("pyproject.toml", "setup.py", "LICENSE", ".ci/run")
_FOLDERS = ("lowprec", "recipes", "converters", "kernels", "tools", "tests", "docs")
# Folders of data and links are one line each; so are files that cannot say what they are.
_SAID = {
    "pyproject.toml": "packaging, dependencies, ruff, mypy, pytest",
    "LICENSE": "Apache-2.0",
    "lowprec/kernels": "-> ../kernels: one package, with short paths",
    "lowprec/converters": "-> ../converters",
    "lowprec/recipes": "-> ../recipes",
    "lowprec/py.typed": "the package has types",
    "tests/data/megatron/": "three tiny models as transformers and Megatron save them",
    "tests/golden/": "bytes that the trainers' own implementations made",
    "tests/recipes/": "recipes of a user, and the contract of each of ours as it was last meant",
}
_WIDTH = 140


def documents() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def renewed(text: str) -> str:
    """The document with its examples run again and its tree made anew."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(MODEL, Path(folder) / "Qwen3-MoE")
        text = _BLOCK.sub(lambda block: "".join(_examples(block[0], Path(folder))), text)
    return _TREE.sub(lambda _: f"```\n{''.join(tree())}```\n", text)


def same(ours: str, theirs: str) -> bool:
    """Whether two texts differ in nothing but durations."""
    return _TIME.sub("", ours) == _TIME.sub("", theirs)


def _examples(block: str, folder: Path) -> Iterator[str]:
    """Each command of a block, and what it prints on a terminal; the exit code does not count."""
    for line in block.splitlines():
        if line.startswith("$ "):
            yield f"{line}\n{_run(line[2:], folder)}"


def _run(command: str, folder: Path) -> str:
    """What a command prints on a terminal of COLUMNS columns, its standard error last and without progress."""
    ours, theirs = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    shown = b""
    while part := _read(ours):
        shown += part
    os.close(ours)
    assert process.stderr is not None
    shown += process.stderr.read()
    process.wait()
    lines = _CONTROL.sub("", shown.decode()).splitlines()
    return "".join(f"{line}\n" for line in "\n".join(line.rstrip() for line in lines).strip("\n").splitlines())


def _read(descriptor: int) -> bytes:
    """Some bytes of a terminal; none at its end, which Linux reports as an error."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def tree() -> Iterator[str]:
    """Every file of the repository, one line each, below a line for its folder."""
    above: tuple[str, ...] = ()
    for path in (*_FILES, *(path for folder in _FOLDERS for path in _inside(ROOT / folder))):
        *folders, name = path.removesuffix("/").split("/")
        for depth, folder in enumerate(folders):
            if above[: depth + 1] != tuple(folders[: depth + 1]):
                yield f"{'  ' * depth}{folder}/\n"
        above = tuple(folders)
        yield _line(f"{'  ' * len(folders)}{name}{'/' * path.endswith('/')}", _SAID.get(path) or _says(ROOT / path))


def _inside(folder: Path) -> Iterator[str]:
    """What is in a folder, from the root, its files before its folders; folders of data as such, with a slash."""
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "__pycache__"))]
    for path in sorted(entries, key=lambda path: path.is_dir() and not path.is_symlink()):
        name = path.relative_to(ROOT).as_posix()
        if path.is_symlink() or path.is_file():
            if path.suffix != ".so":
                yield name
        elif f"{name}/" in _SAID:
            yield f"{name}/"
        else:
            yield from _inside(path)


def _line(name: str, says: str) -> str:
    """One line; where it would be too long it ends at the last colon, semicolon or full stop that makes it fit."""
    text = f"{name:<34} {says}"
    while len(text) > _WIDTH and (cut := max(text.rfind(mark) for mark in (": ", "; ", ". "))) > 0:
        text = text[:cut]
    return f"{text}\n"


def _says(path: Path) -> str:
    """The first line of a file's docstring, comment, heading or description."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return str(tomllib.loads(text)["description"])
    found = re.search(r'"""(.+)' if path.suffix == ".py" else r"(?:^|\n)(?:#|/\*+|//) +(.+)", text)
    return found[1].removesuffix('"""').removesuffix("*/").strip().removesuffix(".") if found else ""


def main(arguments: list[str]) -> int:
    """Renew the documents; with --check only say which are out of date."""
    stale = []
    for path in documents():
        old = path.read_text(encoding="utf-8")
        new = renewed(old)
        if not same(old, new):
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    print("\n".join(stale) or "all true")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
