#!/usr/bin/env bash
# Deletes the queued resource with its machines. Run directory and logs in the bucket stay.
#
#   scripts/tpu/delete.sh
#   DRY_RUN=1 scripts/tpu/delete.sh  prints the command
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
[ $# = 0 ] || fail "$1: unknown argument; see $SCRIPT --help"
load_settings
if ! is_dry && [ "$(queue_state)" = ABSENT ]; then
  note "$TPU_NAME: no such queued resource in $ZONE, nothing to delete"
  exit 0
fi
# --force deletes the machines too; without it a request that was served cannot be deleted.
run gcloud compute tpus queued-resources delete "$TPU_NAME" "${LOCATION[@]}" --force --quiet
if ! is_dry; then rm -f "$(pod_folder)/owned"; fi
