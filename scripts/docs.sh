#!/usr/bin/env bash
# Builds the documentation site from docs/ into docs/_build/html. Warnings are errors. First installs the packages of the
# extra [docs] into .venv. Needs no network once they are installed.
#
#   scripts/docs.sh           then open docs/_build/html/index.html
#   INSTALL=0 scripts/docs.sh with what is installed
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh docs
JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} exec "${VENV:-.venv}/bin/python" -m sphinx -b html -W --keep-going -n -E -q \
  -d docs/_build/doctrees docs docs/_build/html "$@"
