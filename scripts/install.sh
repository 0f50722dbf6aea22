#!/usr/bin/env bash
# Installs the package with the given extras into .venv, in the versions of scripts/constraints.txt. It makes the
# environment if there is none.
#
#   scripts/install.sh test,servers               other packages may follow: scripts/install.sh test 'jax[tpu]'
#   PYTHON=python3.12 VENV=.venv-smoke scripts/install.sh test
#   INSTALL=0 scripts/install.sh test             nothing: the packages are there
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${INSTALL:-1}" = 0 ]; then exit; fi
venv=${VENV:-.venv}
if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
exec "$venv/bin/python" -m pip --quiet --disable-pip-version-check install -c scripts/constraints.txt -e ".[$1]" "${@:2}"
