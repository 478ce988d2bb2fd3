#!/usr/bin/env bash
# Everything that CI checks. Arguments go to pytest: tools/test.sh tests/test_cli.py -x
# Needs Python 3.11 and no GPU; reaches the network only to install packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/venv.sh

echo "== ruff check";  "$python" -m ruff check .
echo "== ruff format"; "$python" -m ruff format --check .
echo "== mypy";        "$python" -m mypy
echo "== pytest";      exec "$python" -m pytest -n auto --dist loadfile "$@"
