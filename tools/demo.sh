#!/usr/bin/env bash
# From a machine with Python 3.11 to converted, verified and loaded checkpoints of three models, and a table of them.
# Needs no GPU; reaches the network only to install packages. Writes to ./demo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/venv.sh

PATH=$PWD/.venv/bin:$PATH
echo "== lowprec recipes"
lowprec recipes
exec "$python" tools/demo.py demo
