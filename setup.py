"""Checks and the compiled kernels, which only code can describe; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = "lowprec.kernels.cpu._native"

for link in ("kernels", "converters", "recipes"):
    if not (ROOT / "lowprec" / link).is_dir():
        # A clone with core.symlinks=false holds text files where the links should be.
        sys.exit(
            f"lowprec/{link} is not a folder: this checkout lost its symbolic links; clone it with core.symlinks=true"
        )

# Left over, they would bring deleted modules back into the wheel.
for leftover in (ROOT / "build").glob("lib*"):
    shutil.rmtree(leftover, ignore_errors=True)

recipe = runpy.run_path(str(ROOT / "kernels" / "cpu" / "_build.py"))
flags = list(recipe["FLAGS"])
files = [os.path.relpath(path, ROOT) for path in recipe["sources"]()]


class BuildNative(build_ext):
    """A plain shared library that ctypes loads: no Python in its name, no PyInit in it."""

    def run(self) -> None:
        """Build. In place, the old library goes first: a failed build must leave none, not that one."""
        if self.inplace:
            (ROOT / "kernels" / "cpu" / "_native.so").unlink(missing_ok=True)
        super().run()

    def get_ext_filename(self, ext_name: str) -> str:
        """Without the tag of one Python version: any version may load it."""
        return os.path.join(*ext_name.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Those that the source marks."""
        return list(ext.export_symbols)


class NativeWheel(bdist_wheel):
    """For any Python 3, on the platform whose library it holds."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            NATIVE,
            sources=[path for path in files if path.endswith(".c")],
            depends=files,
            define_macros=[(recipe["DIGEST_MACRO"], f'"{recipe["digest"]()}"')],
            extra_compile_args=flags,
            extra_link_args=flags,
            libraries=["m"],
            optional=True,  # no compiler: the numpy reference runs instead, and `lowprec doctor` says so
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)
