"""How the compiled kernels are built, shipped, found and done without."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fingerprint import fingerprint

from lowprec import backends, tiles
from lowprec.formats import BUILTIN, get_format
from lowprec.kernels.cpu import _build
from lowprec.kernels.cpu import status as cpu_status

ROOT = Path(__file__).parents[2]
TREE = ("lowprec", "kernels", "converters", "recipes", "setup.py", "pyproject.toml", "LICENSE")
SCRIPT = Path(__file__).with_name("fingerprint.py")


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the checkout without anything that was built."""
    for name in TREE:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text("# lowprec\n", encoding="utf-8")
    return tmp_path


def build(tree: Path, **env: str) -> None:
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env=env)


def compile_by_hand(tree: Path, *flags: str) -> None:
    """One compiler call, as for another machine or compiler."""
    compiler = sysconfig.get_config_var("CC").split()[0]
    digest = f'-D{_build.DIGEST_MACRO}="{_build.digest(str(tree / "kernels" / "cpu"))}"'
    folder = tree / "kernels" / "cpu"
    run(compiler, "-shared", "-fPIC", *_build.FLAGS, *flags, digest, "_native.c", "-o", "_native.so", "-lm", cwd=folder)


def report(tree: Path) -> list[str]:
    """What fingerprint.py prints with the package in `tree`."""
    return run(sys.executable, SCRIPT, cwd=tree, env={"PYTHONPATH": str(tree)}).splitlines()


@pytest.fixture(scope="module")
def expected() -> str:
    """The reference's fingerprint."""
    return fingerprint(get_format)


def test_they_run_here() -> None:
    """Without this a failed build would let every other test skip to the reference."""
    (cpu,) = (status for status in backends.status() if status.name == "cpu")
    assert cpu == ("cpu", True, cpu_status(), BUILTIN)
    if platform.machine() == "x86_64":
        assert "x86-64" in cpu.detail


def test_auto_takes_them(monkeypatch) -> None:
    x = np.ones((128, 128), np.float32)
    monkeypatch.setattr(tiles, "quantize", None)
    monkeypatch.setattr(tiles, "dequantize", None)
    for name in BUILTIN:
        backends.dequantize(backends.quantize(x, name))
        backends.fake_quantize(x, name)


def test_flags_of_the_user_change_no_byte(tree, expected) -> None:
    build(tree, CFLAGS="-Ofast -march=native -ffinite-math-only", LDFLAGS="-Ofast")
    status, subnormals, made = report(tree)
    assert "active=True" in status
    assert subnormals == "subnormals are kept", "the linker added code that flushes them"
    assert made == expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_every_instruction_set_makes_the_same_bytes(tree, expected, level) -> None:
    if level == "x86-64-v4" and level not in cpu_status():
        pytest.skip("this processor has no AVX-512")
    compile_by_hand(tree, "-DLOWPREC_NO_CLONES", f"-march={level}")
    assert report(tree)[2] == expected


def test_without_optimization_the_same_bytes(tree, expected) -> None:
    compile_by_hand(tree, "-DLOWPREC_NO_CLONES", "-O1", "-fno-tree-vectorize", "-fsanitize=undefined,bounds-strict")
    assert report(tree)[2] == expected


@pytest.mark.parametrize("flag", ["-ffast-math", "-ffinite-math-only", "-mfpmath=387"])
def test_refuses_to_be_built_with_loose_arithmetic(tree, flag) -> None:
    if flag.startswith("-m") and platform.machine() != "x86_64":
        pytest.skip("x87 is of x86")
    with pytest.raises(AssertionError, match="these kernels need"):
        compile_by_hand(tree, "-DLOWPREC_NO_CLONES", flag)


def test_a_library_of_other_sources_is_refused(tree) -> None:
    build(tree)
    assert "active=True" in report(tree)[0]
    source = tree / "kernels" / "cpu" / "_codecs.h"
    source.write_text(source.read_text() + "\n", encoding="utf-8")
    status = report(tree)[0]
    assert "active=False" in status
    assert "built from other sources" in status


def test_installs_without_a_compiler_and_falls_back(tree) -> None:
    site = tree / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, tree)
    run(*pip, cwd=tree, env={"CC": "false"})
    assert not list(site.rglob("*.so"))
    code = (
        "import numpy as np\n"
        "from lowprec import quantize\n"
        "from lowprec.errors import BackendError\n"
        "x = np.ones((128, 128), np.float32)\n"
        "print(quantize(x, 'fp8_block').scale)\n"
        "try:\n"
        "    quantize(x, 'fp8_block', backend='cpu')\n"
        "except BackendError as error:\n"
        "    print(error)\n"
    )
    scale, error = run(sys.executable, "-c", code, cwd=site, env={"PYTHONPATH": str(site)}).splitlines()
    assert scale == "[[0.00223214]]"
    assert error.startswith("no compiled CPU kernels: it was not built (")
    assert "reinstall lowprec where a C compiler is" in error


def test_a_failed_rebuild_leaves_no_old_library(tree) -> None:
    build(tree)
    library = tree / "kernels" / "cpu" / "_native.so"
    assert library.exists()
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force", cwd=tree, env={"CC": "false"})
    assert not library.exists()


def test_the_wheel(tree) -> None:
    """For any Python, with the library, without its sources."""
    out = tree / "out"
    wheel_of = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree)
    (tree / "build" / "lib" / "lowprec").mkdir(parents=True)
    (tree / "build" / "lib" / "lowprec" / "deleted.py").touch()
    run(*wheel_of, cwd=tree)
    (wheel,) = out.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lowprec/kernels/")}
    here = {f"lowprec/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert names == {*here, "lowprec/kernels/cpu/_native.so"}
    assert "lowprec/deleted.py" not in zipfile.ZipFile(wheel).namelist()
