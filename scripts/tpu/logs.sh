#!/usr/bin/env bash
# Shows the log of the job on the pod.
#
#   scripts/tpu/logs.sh                      the last 50 lines of worker 0
#   scripts/tpu/logs.sh -n 200 --worker 3    more, of another one (with SLICES, of the first slice)
#   scripts/tpu/logs.sh --follow             as it grows, until Ctrl-C
#   scripts/tpu/logs.sh --fetch FOLDER       the whole logs of all workers, one file each
#   DRY_RUN=1 scripts/tpu/logs.sh …          prints the commands
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
worker=0 lines=50 follow='' folder=''
while [ $# -gt 0 ]; do
  case $1 in
    -n) lines=${2:?-n needs a number} && shift ;;
    --worker) worker=${2:?--worker needs a number} && shift ;;
    --follow | -f) follow=follow ;;
    --fetch) folder=${2:?--fetch needs a folder} && shift ;;
    *) fail "$1: unknown argument; see $SCRIPT --help" ;;
  esac
  shift
done
load_settings
if [ -n "$folder" ]; then
  run mkdir -p "$folder"
  tpu_vm ssh "$TPU_NAME" --worker=all --command="$(job logs "$RUN_NAME" all)" --output-directory="$folder"
else
  on_workers "$worker" "$(job logs "$RUN_NAME" "$lines" $follow)"
fi
