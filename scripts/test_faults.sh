#!/usr/bin/env bash
# Breaks trainings in every known way, from outside, and compares their end with undisturbed trainings.
#
#   scripts/test_faults.sh                        all twenty tests: about 15 minutes on two cores
#   scripts/test_faults.sh sigkill disk           some of them
#   scripts/test_faults.sh --random 100 --seed 7  100 drawn run shapes, faults and restarts
#   scripts/test_faults.sh --seed 7 --only 42     draw 42 of that seed alone
#
# The tests: sigkill sigterm devices hosts processes flips files disk last-save nan rewind records order dying-host
# perplexity hostile mismatch imports pickle scripts. Small file systems in memory are mounted where that is permitted.
# Elsewhere the limit on file sizes makes a disk full. Prints one table: fault, tries, survived, steps lost, seconds from
# a restart to its first step. Then it lists what failed. The exit code is 1 if anything failed.
#
#   --folder DIR     keep the runs there, and use them the next time
#   --attacks        random draws have ten more kinds of faults: wrong chips and copies, strangers' files, absurd
#                    numbers, the death of a process whose host keeps the state in memory, a changed digit, planted
#                    folders, pipes, secrets, and work that hangs
#   --restarts N     runs that are killed or stopped after every step or two, until N restarts were made
#   --jobs N         draws at the same time; default: 2
#   --results FILE   append the result of each draw, and skip draws that the file has: 1,000 draws in parts
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
