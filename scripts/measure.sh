#!/usr/bin/env bash
# Runs the queue of measurements, scripts/gpu/rows/*.toml, and takes results of GPUs and TPUs: scripts/measure.py explains it.
#
#   scripts/measure.sh --list                                  the queue, with times and results
#   scripts/measure.sh --pack .gpu_pack                        here: fetches the wheels that the GPU machine lacks
#   scripts/measure.sh --pack .gpu_pack --data study_store     here: and packs data for rows that need it
#   scripts/measure.sh --minutes 9 --out OUT                   there: runs rows by value until the time is up
#   scripts/measure.sh --minutes 9 --out OUT --only a,b        these rows alone, also if they have results
#   scripts/measure.sh --merge OUT/results.jsonl               here: into scripts/measurements.jsonl, docs/lab/hardware.md, lm/ops/gpu
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
fi
exec "$python" "$root/scripts/measure.py" "$@"
