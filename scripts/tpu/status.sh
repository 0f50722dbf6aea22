#!/usr/bin/env bash
# Shows the state of the request, of the machines, and of the job on each worker with the last line of its log.
#
#   scripts/tpu/status.sh
#   DRY_RUN=1 scripts/tpu/status.sh  prints the commands
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
[ $# = 0 ] || fail "$1: unknown argument; see $SCRIPT --help"
load_settings
queue=$(queue_state)
if [ "$queue" = ABSENT ]; then
  echo "$TPU_NAME: no such queued resource in $ZONE; scripts/tpu/create.sh asks for it"
  exit 0
fi
if [ "$queue" != ACTIVE ]; then
  echo "queued resource $TPU_NAME: $queue"
  run gcloud compute tpus queued-resources describe "$TPU_NAME" "${LOCATION[@]}" '--format=yaml(state)'
  exit 0
fi
node=$(node_state)
if ! is_dry; then echo "queued resource $TPU_NAME: $queue, machines: $node, expected workers: $PROCESSES"; fi
on_workers all "$(job status "$RUN_NAME")"
