#!/usr/bin/env bash
# Breaks trainings in every way that is known, from outside, and compares what they end with to undisturbed ones.
#
#   scripts/test_faults.sh                        all twenty tests: about 15 minutes on two cores
#   scripts/test_faults.sh sigkill disk           some of them
#   scripts/test_faults.sh --random 100 --seed 7  100 drawn run shapes, faults and restarts
#   scripts/test_faults.sh --seed 7 --only 42     draw 42 of that seed alone
#
# The tests: sigkill sigterm devices hosts processes flips files disk last-save nan rewind records order dying-host
# perplexity hostile mismatch imports pickle scripts. Small file systems in memory are mounted where that is permitted;
# elsewhere a disk is full by the limit on file sizes. Prints one table: fault, tries, survived, steps lost, seconds from
# a restart to its first step; then what failed. The exit code is 1 if anything did.
#
#   --folder DIR     keep the runs there, and use them the next time
#   --jobs N         so many draws at a time; default: 2
#   --results FILE   append what came of each draw, and leave out the draws that stand there: 1,000 draws in parts
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in
  *' -h '* | *' --help '*)
    awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' scripts/test_faults.sh
    exit 0
    ;;
esac
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" tests/faults/battery.py "$@"
