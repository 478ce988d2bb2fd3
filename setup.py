"""Checks that only code can do; everything else is in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent

for link in ("kernels", "converters", "recipes"):
    if not (ROOT / "lowprec" / link).is_dir():
        # A clone with core.symlinks=false holds text files where the links should be.
        sys.exit(
            f"lowprec/{link} is not a folder: this checkout lost its symbolic links; clone it with core.symlinks=true"
        )

# A leftover build/lib would bring deleted modules back into the wheel.
shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)

setup()
