#!/usr/bin/env bash
# Checks every worker of the pod before a run is started: free disk, stale libtpu lock, known faults of libtpu, bucket writable, tokenizer of
# the token store (SHA-256 against its dataset.json), and that the right number of processes and devices join.
#
#   scripts/tpu/preflight.sh
#   scripts/tpu/preflight.sh --fix             removes a stale /tmp/libtpu_lockfile
#   scripts/tpu/preflight.sh --precision --mechanisms configs/attention/polysketch.gin
#                                              then compares the kernels with XLA alone on a chip of each worker; later
#                                              arguments go to `lm bench precision`
#   scripts/tpu/preflight.sh --burn-in 30 --gin_file configs/models/small.gin
#                                              compares the kernels as --precision does, then looks for 30 minutes for chips
#                                              that compute wrongly; later arguments are the configuration of the run
#   DRY_RUN=1 scripts/tpu/preflight.sh         prints the command
#
# The bucket is the bucket of RUN_DIR, and the token store is DATA_PATH. Exit codes: 0 all is well, 44 the tokenizer does
# not match the data, 45 a chip computes wrongly, 1 anything else. Each failure is one line with its remedy.
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
fix=()
precision=()
chips=()
while [ $# -gt 0 ]; do
  case $1 in
    --fix) fix=(--fix) ;;
    --precision)
      precision=(.venv/bin/lm bench precision "${@:2}")
      break
      ;;
    --burn-in)
      [[ ${2:-} =~ ^[0-9]+([.][0-9]+)?$ ]] || fail "--burn-in ${2:-}: give the minutes, such as --burn-in 30"
      precision=(.venv/bin/lm bench precision "${@:3}")
      chips=(.venv/bin/lm bench chips --minutes "${@:2}")
      break
      ;;
    *) fail "$1: unknown argument; see $SCRIPT --help" ;;
  esac
  shift
done
load_settings
check=(.venv/bin/python scripts/tpu/vm/preflight.py --processes "$PROCESSES" --devices "$DEVICES" --min_free_gb "$MIN_FREE_GB")
parent=${RUN_DIR%/*}
case $parent in gs:/ | s3:/) parent=$RUN_DIR ;; esac # a bucket itself
if [ -n "$parent" ]; then check+=(--writable "$parent"); fi
if [ -n "$DATA_PATH" ]; then check+=(--data "$DATA_PATH"); fi
on_workers all "cd lm && $(quote_all "${check[@]}" ${fix[@]+"${fix[@]}"})"
if [ ${#precision[@]} -gt 0 ]; then on_workers all "cd lm && $(quote_all "${precision[@]}")"; fi
if [ ${#chips[@]} -gt 0 ]; then on_workers all "cd lm && $(quote_all "${chips[@]}")"; fi
