#!/usr/bin/env bash
# Shows what every worker is doing: the stacks of all threads of its run, which goes on. For a run that stands still.
#
#   scripts/tpu/stacks.sh               of all workers
#   scripts/tpu/stacks.sh --worker 3    of one worker
#   DRY_RUN=1 scripts/tpu/stacks.sh     prints the command
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
worker=all
if [ "${1:-}" = --worker ]; then
  worker=${2:?--worker needs a number}
  shift 2
fi
[ $# = 0 ] || fail "$1: unknown argument; see $SCRIPT --help"
load_settings
on_workers "$worker" "$(job stacks "$RUN_NAME")"
