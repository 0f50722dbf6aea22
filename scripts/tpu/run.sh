#!/usr/bin/env bash
# Starts a command on every worker of the pod, detached: it survives the end of this terminal.
#
#   scripts/tpu/run.sh lm train --gin_file configs/models/small.gin --gin_file data/pg19.gin --gin_param 'train.microbatches = 4'
#   scripts/tpu/run.sh --stop        makes the run save and end (exit code 42)
#   DRY_RUN=1 scripts/tpu/run.sh …   prints the commands
#
# First runs `lm check` on this machine, to see whether the step fits ACCELERATOR_TYPE (CHECK=0 skips it).
# Adds --run_dir RUN_DIR to `lm train` and `lm distill`, and the binding mesh.processes = N. With it the run refuses to
# start unless all N workers join it. `lm distill` is not checked before. Starting the same command again while it runs does nothing. The log stays on each machine in
# ~/lm-jobs/RUN_NAME/log (see logs.sh), and is copied to LOG_URL if that is set.
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
load_settings
if [ "${1:-}" = --stop ]; then
  on_workers all "$(job stop "$RUN_NAME")"
  exit
fi
if [ "${1:-}" = -- ]; then shift; fi
[ $# -gt 0 ] || fail "no command; for example: scripts/tpu/run.sh lm train --gin_file configs/models/small.gin"
complete_command "$@"
check_command "$@"
on_workers all "$(job start "$RUN_NAME" "$LOG_URL" "${COMMAND[@]}")"
