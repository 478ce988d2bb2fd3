"""tests/golden holds the same bytes as the folder that the golden files are handed over in."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
COPIES = REPOSITORY / "tests" / "golden"
ORIGINALS = REPOSITORY.parent / "shared" / "golden"


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="no folder shared/golden beside the repository")
def test_copies_are_the_originals() -> None:
    names = {path.name for path in ORIGINALS.iterdir()}
    assert names == {path.name for path in COPIES.iterdir()}
    different = [name for name in sorted(names) if (ORIGINALS / name).read_bytes() != (COPIES / name).read_bytes()]
    assert not different
