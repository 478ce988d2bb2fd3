"""Pin the contract and digest of every recipe on one model, so that a change of either is seen and meant.

python tools/pin_contracts.py            compare with tests/recipes/contracts.json
python tools/pin_contracts.py --write    write it anew: every checkpoint made before will be refused as different
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "recipes" / "contracts.json"
DENSE = ("mxfp4_dense",)

sys.path.insert(0, str(ROOT / "tests"))

import sample_models  # noqa: E402

from lowprec.contract import first_difference  # noqa: E402
from lowprec.recipe import list_recipes  # noqa: E402


def contracts() -> dict[str, Any]:
    """Recipe -> model, digest and the whole contract as JSON."""
    found = {}
    for name in list_recipes():
        kind = "qwen3" if name in DENSE else "deepseek_v3"
        contract = sample_models.contract(name, kind)
        found[name] = {"model": kind, "digest": contract.digest, "contract": contract.to_json()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare or pin the contracts of all recipes.")
    parser.add_argument("--write", action="store_true", help="write the file anew")
    if parser.parse_args().write:
        FILE.write_text(json.dumps(contracts(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    difference = first_difference(json.loads(FILE.read_text(encoding="utf-8")), contracts(), "pinned")
    sys.exit(difference or 0)


if __name__ == "__main__":
    main()
