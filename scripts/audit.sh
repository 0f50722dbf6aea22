#!/usr/bin/env bash
# Compares lm with code by other authors, in a separate environment (.venv-audit, 3 GB of wheels from package registries):
#
#   attention                      fla-core, performer-pytorch, PyTorch, JAX, tokamax
#   models                         transformers
#   loss and optimizer             PyTorch, optax
#   what a run writes              Orbax, safetensors, SentencePiece, lm-evaluation-harness
#
# Prints a table. Exits with 1 where a difference is above its tolerance. Takes some minutes. docs/lab/audit.md has the table.
#
#   scripts/audit.sh [--markdown] [--only WORD]
#   PYTHON=python3.12 scripts/audit.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-audit
VENV=$venv scripts/install.sh audit
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --no-deps 'fla-core>=0.6' 'performer-pytorch>=1.1'  # files are read one by one; they ask for GPU compilers
pip install -c scripts/constraints.txt 'tokamax>=0.0.12' || echo 'tokamax cannot be installed here: its rows are left out'
export PYTHONPATH=$PWD JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
exec "$venv/bin/python" tests/audit/audit.py "$@"
