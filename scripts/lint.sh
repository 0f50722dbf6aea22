#!/usr/bin/env bash
# Checks all files without running them, with the tools of the extra [test]. .ci/run and pre-commit call it.
#
#   scripts/lint.sh              every check; pyright takes 20 seconds or more
#   scripts/lint.sh ruff-check   one check: ruff-check ruff-format shellcheck pyright
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
[ $# -gt 0 ] || set -- ruff-check ruff-format shellcheck pyright
for check in "$@"; do
  case $check in
    ruff-check) "$bin/ruff" check --quiet . ;;
    ruff-format) "$bin/ruff" format --quiet --check . || { echo "run: $bin/ruff format ." >&2 && exit 1; } ;;
    shellcheck) git ls-files -z '*.sh' .ci/run | xargs -0 "$bin/shellcheck" -x -P SCRIPTDIR ;;
    pyright) "$bin/pyright" --pythonpath "$bin/python" ;;
    *) echo "lint.sh: '$check': must be ruff-check, ruff-format, shellcheck or pyright" >&2 && exit 2 ;;
  esac
done
