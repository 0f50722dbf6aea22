#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them; arguments go to pytest.
#
#   scripts/test.sh                 the whole default suite
#   scripts/test.sh -m slow         the long tests (kill loops, learning tasks, TPU compilation)
#   scripts/test.sh -m gpu          the tests that need an NVIDIA GPU
#   PYTHON=python3.12 scripts/test.sh -m smoke
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}
if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
fi
extras='test'
case " $* " in
  *' -m gpu '*)
    extras='test,gpu'
    export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} XLA_PYTHON_CLIENT_PREALLOCATE=false WORKERS=${WORKERS:-1}
    ;;
esac
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
"$venv/bin/ruff" check lm tests setup.py
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
workers=${WORKERS:-$("$venv/bin/python" -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')}
exec "$venv/bin/python" -m pytest -n "$workers" --dist loadfile "$@"
