"""What the compiled library is built from: its sources, its flags, and one digest of both.

Standard library only: setup.py runs this file before anything is installed.
"""

from __future__ import annotations

import hashlib
import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
DIGEST_MACRO = "LOWPREC_NATIVE_DIGEST"

# For compiler and linker, after whatever the user's CFLAGS say: an -Ofast left standing would, at the link, add code
# that makes every thread which loads the library flush subnormals. -fno-trapping-math changes no result; without it
# GCC does not turn a choice between two values into vector code, which is three to ten times slower.
FLAGS = (
    "-std=c11",
    "-fvisibility=hidden",
    "-O3",
    "-g0",
    "-fno-fast-math",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffp-contract=off",
)


def sources(folder: str = FOLDER) -> list[str]:
    """The C files that lie in `folder`, sorted; none where the package was installed without them."""
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith((".c", ".h")))


def digest(folder: str = FOLDER) -> str:
    """sha256 of the flags and of every source, name and text."""
    out = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sources(folder):
        with open(path, "rb") as file:
            text = file.read()
        out.update(f"\n{os.path.basename(path)} {len(text)}\n".encode() + text)
    return out.hexdigest()
