"""The wheel holds exactly the folders' files and works where the checkout is not; so do its types."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lowprec

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests" / "data" / "megatron" / "qwen3_moe" / "hf"
HAS_COMPILER = shutil.which("cc") is not None
NATIVE = "lowprec/kernels/cpu/_native.so"

CONSUMER = """
import numpy as np
from lowprec import Contract, QTensor, Recipe, convert, dequantize, explain, inspect, load_recipe, quantize, verify

recipe: Recipe = load_recipe("mxfp8", ["policy.last=0"])
contract: Contract = explain("in", recipe).contract
tensor: QTensor = quantize(np.zeros((2, 32), np.float32), "mxfp8")
dequantize(tensor, "float32")
ok: bool = verify("out", against="in").ok
seconds: float = convert("in", "out", recipe, workers=2).seconds
dialect: str = inspect("out").dialect
"""
MISUSE = 'from lowprec import convert\n\nconvert("in", "out", 5)\n'


def command(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**environment, "PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, check=False)


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build from a copy of what belongs to the package, as from a fresh clone."""
    tree = folder / "tree"
    tree.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("lowprec", "kernels", "converters", "recipes"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    words = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    done = command(*words, cwd=tree, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this one. Returns its folder of programs."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = ("-m", "pip", "--python", folder / "bin" / "python", "install", "--no-index", "--no-deps", "--quiet")
    done = command(sys.executable, *words, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected_files() -> set[str]:
    """The package's sources and data where they lie, under the names that they are installed by."""
    found = {path.relative_to(ROOT) for path in (ROOT / "lowprec").rglob("*.py")}
    for link in ("kernels", "converters"):
        found |= {"lowprec" / path.relative_to(ROOT) for path in (ROOT / link).rglob("*.py")}
    found |= {"lowprec" / path.relative_to(ROOT) for path in (ROOT / "recipes").glob("*.toml")}
    return {path.as_posix() for path in found} | {"lowprec/py.typed"}


def test_the_wheel_holds_the_folders_and_nothing_else(wheel: Path) -> None:
    expected = expected_files()
    assert len(expected) > 60
    assert files_of(wheel) == expected | ({NATIVE} if HAS_COMPILER else set())


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    assert wheel.name.startswith(f"lowprec-{lowprec.__version__}-py3-none-")
    info = f"lowprec-{lowprec.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "lowprec = lowprec.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    required = {line.partition(">")[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert required == {"numpy", "ml_dtypes", "xxhash", "click", "rich"}


def test_it_works_outside_the_checkout(programs: Path, tmp_path: Path) -> None:
    where = command(programs / "python", "-c", "import lowprec; print(lowprec.__file__)", cwd=tmp_path)
    assert str(programs.parent) in where.stdout
    assert command(programs / "lowprec", "--version", cwd=tmp_path).stdout == f"lowprec {lowprec.__version__}\n"
    assert "nvfp4_experts" in command(programs / "lowprec", "recipes", cwd=tmp_path).stdout
    done = command(programs / "lowprec", "convert", SOURCE, "out", "--recipe", "nvfp4_experts", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert command(programs / "lowprec", "verify", "out", "--against", SOURCE, cwd=tmp_path).returncode == 0
    lowprec.convert(SOURCE, tmp_path / "ours", "nvfp4_experts")
    assert files_and_bytes(tmp_path / "out") == files_and_bytes(tmp_path / "ours")


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler on this machine")
def test_the_compiled_kernels_are_active(programs: Path, tmp_path: Path) -> None:
    shown = command(programs / "lowprec", "doctor", cwd=tmp_path).stdout
    assert any(line.split()[:2] == ["cpu", "yes"] for line in shown.splitlines()), shown


def test_without_a_compiler_it_installs_and_gives_the_same_bytes(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="false")
    assert files_of(wheel) == expected_files()
    programs = install(wheel, tmp_path / "installed")
    shown = command(programs / "lowprec", "doctor", cwd=tmp_path).stdout
    assert any(line.split()[:2] == ["cpu", "no"] for line in shown.splitlines()), shown
    done = command(programs / "lowprec", "convert", SOURCE, "out", "--recipe", "nvfp4_experts", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lowprec.convert(SOURCE, tmp_path / "ours", "nvfp4_experts")
    assert files_and_bytes(tmp_path / "out") == files_and_bytes(tmp_path / "ours")


def test_the_installed_package_is_typed(programs: Path, tmp_path: Path) -> None:
    def mypy(*words: str | Path) -> subprocess.CompletedProcess[str]:
        base = (sys.executable, "-m", "mypy", "--python-executable", programs / "python")
        return command(*base, "--cache-dir", tmp_path / "cache", *words, cwd=tmp_path)

    whole = mypy("--config-file", ROOT / "pyproject.toml")
    assert whole.returncode == 0, whole.stdout
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "misuse.py").write_text(MISUSE)
    good = mypy("--strict", "--config-file", "/dev/null", "consumer.py")
    assert good.returncode == 0, good.stdout
    bad = mypy("--strict", "--config-file", "/dev/null", "misuse.py")
    assert 'Argument 3 to "convert" has incompatible type "int"' in bad.stdout


def files_and_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
