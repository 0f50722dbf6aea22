#!/usr/bin/env bash
# Runs the queue of GPU measurements, scripts/gpu/rows/*.toml: scripts/gpu/day.py explains it.
#
#   scripts/gpu/day.sh --list                                  the queue, with times and results
#   scripts/gpu/day.sh --pack .gpu_pack                        here: fetches the wheels that the GPU machine lacks
#   scripts/gpu/day.sh --pack .gpu_pack --data study_store     here: and packs data for rows that need it
#   scripts/gpu/day.sh --minutes 9 --out OUT                   there: runs rows by value until the time is up
#   scripts/gpu/day.sh --minutes 9 --out OUT --only a,b        these rows alone, also if they have results
#   scripts/gpu/day.sh --merge OUT/results.jsonl               here: into results.jsonl, docs/hardware.md, lm/ops/gpu
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
fi
exec "$python" "$root/scripts/gpu/day.py" "$@"
