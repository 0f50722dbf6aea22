#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them.
#
#   scripts/test.sh                 the short run: the quick tests of every folder, in a few minutes
#   scripts/test.sh --all           everything but what the lines below run
#   scripts/test.sh tests/attention one folder, whole; all other arguments go to pytest, too
#   scripts/test.sh -m slow         the long tests (kill loops, learning tasks, TPU compilation)
#   scripts/test.sh -m journey      whole acts of a user (tests/journeys), with the one that takes a quarter of an hour
#   scripts/test.sh -m gpu          the tests that need an NVIDIA GPU
#   scripts/test.sh -m interop      against PyTorch, transformers and lm-evaluation-harness (some GB of wheels)
#   scripts/test.sh --install       nothing: it installs only
#   PYTHON=python3.12 scripts/test.sh -m smoke
#   GPU_COMPILER=1 PYTHON=python3.12 scripts/test.sh tests/ops/test_pallas_gpu*.py   GPU kernels, interpreted and compiled
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
extras='test,servers'
case " $* " in
  *' -m gpu '*)
    extras='test,gpu'
    export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} XLA_PYTHON_CLIENT_PREALLOCATE=false WORKERS=${WORKERS:-1}
    ;;
  *' -m interop '*) extras='test,interop' ;;
esac
# libtpu compiles for TPUs that are not present, and JAX's CUDA plugin with ptxas for GPUs. Both exist for Linux only.
compilers=()
if [ "$(uname -sm)" = 'Linux x86_64' ]; then compilers=('jax[tpu]'); fi
if [ -n "${GPU_COMPILER:-}" ]; then compilers+=('jax[cuda13-local]'); fi
scripts/install.sh "$extras" ${compilers[@]+"${compilers[@]}"}
if [ "${1:-}" = --install ]; then exit; fi
VENV=$venv scripts/lint.sh ruff-check ruff-format shellcheck
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
# macOS does not say which cores a process may use.
count='import os; print(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))'
workers=${WORKERS:-$("$venv/bin/python" -c "$count")}
case ${1:-} in
  '') set -- --short -q --no-header ;;
  --all) set -- -ra --durations=15 "${@:2}" ;;
esac
exec "$venv/bin/python" -m pytest -n "$workers" --dist loadfile "$@"
