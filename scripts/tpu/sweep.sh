#!/usr/bin/env bash
# Runs a sweep with one pod for each point: one supervise.sh per index, PARALLEL pods at a time.
#
#   scripts/tpu/sweep.sh lm sweep --gin_file configs/models/small.gin --sweep_file mine.gin --run_dir gs://bucket/sweeps/a
#   scripts/tpu/sweep.sh 3-5 lm sweep …       points 3, 4 and 5
#   scripts/tpu/sweep.sh 6 lm sweep …         the first six
#   scripts/tpu/sweep.sh --slice [WORD …]     prints the slice of the settings, nothing if CHECK=0; refuses names of examples
#   DRY_RUN=1 scripts/tpu/sweep.sh …          prints the commands
#
# Adds --index I to the command, for each point that `lm sweep --count` counts on this machine. First `lm check` compiles each point on this machine (CHECK=0 skips it). Pods are named
# TPU_NAME-I, and jobs RUN_NAME-I. Their output goes to SWEEP_LOG_DIR. Prints a table of exit codes at the end. The exit
# code is 0 if all codes are 0, else 1. Look at the points first: lm sweep … --dry_run
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
if [ "${1:-}" = --slice ]; then
  load_settings
  check_placeholders "${@:2}"
  if [ "$CHECK" = 1 ]; then echo "$SLICE"; fi
  exit 0
fi
[ $# -ge 2 ] || fail "give the command, lm sweep …; see $SCRIPT --help"
first=0 last=''
case $1 in
  -- | *[!0-9-]*) ;;
  -* | *- | *-*-*) fail "$1: give a number of points, or a range such as 3-5" ;;
  *-*) first=$((10#${1%-*})) last=$((10#${1#*-})) ;;
  *) last=$((10#$1 - 1)) ;;
esac
if [ -n "$last" ]; then shift; fi
if [ "$1" = -- ]; then shift; fi
load_settings

# Sets COUNT to the number of points of the command, which begins with any words before `sweep`.
count_points() {
  local program
  program=$(find_lm) || fail "lm is not installed on this machine, so the points cannot be counted: give their number first"
  while [ "$1" != sweep ]; do shift; done
  COUNT=$("$program" "$@" --count) || fail "the points could not be counted, as the line above says"
  case $COUNT in '' | *[!0-9]*) fail "lm sweep --count printed '$COUNT' in place of a number: give the number first" ;; esac
}
case " $* " in
  *' sweep '*) ;;
  *) fail "$*: give a command of lm sweep" ;;
esac
for flag in --index --jobs --gpus_per_job --dry_run --count; do
  if has_flag "$flag" "$@"; then fail "$flag: each point has a pod and an --index of its own; leave this out"; fi
done
has_flag --run_dir "$@" || fail "no --run_dir; name the folder of the sweep, such as gs://my-bucket/sweeps/a"
check_run_dir "$@"
if [ -z "$last" ]; then
  count_points "$@"
  last=$((COUNT - 1))
fi
[ "$first" -le "$last" ] || fail "the range $first-$last is empty"

if is_dry; then
  for ((i = first; i <= last; i++)); do
    run env TPU_NAME="$TPU_NAME-$i" RUN_NAME="$RUN_NAME-$i" "$HERE/supervise.sh" "$@" --index "$i"
  done
  exit 0
fi

pack_commit
cd "$ROOT"
mkdir -p "$SWEEP_LOG_DIR"
pids=() codes=()
trap 'note "stopped; the pods go on. End one: TPU_NAME='"$TPU_NAME"'-I scripts/tpu/delete.sh"; kill ${pids[@]+"${pids[@]}"} 2>/dev/null || true; exit 130' INT TERM

count_running() {
  local i n=0
  for i in ${pids[@]+"${!pids[@]}"}; do
    if [ -n "${codes[$i]:-}" ]; then continue; fi
    if kill -0 "${pids[$i]}" 2>/dev/null; then
      n=$((n + 1))
    else
      codes[i]=0
      wait "${pids[$i]}" || codes[i]=$?
      note "point $i ended with ${codes[i]}"
    fi
  done
  RUNNING=$n
}

for ((i = first; i <= last; i++)); do
  count_running
  while [ "$RUNNING" -ge "$PARALLEL" ]; do
    sleep "$POLL_SECONDS"
    count_running
  done
  note "point $i starts; its output goes to $SWEEP_LOG_DIR/$RUN_NAME-$i.log"
  TPU_NAME=$TPU_NAME-$i RUN_NAME=$RUN_NAME-$i "$HERE/supervise.sh" "$@" --index "$i" >>"$SWEEP_LOG_DIR/$RUN_NAME-$i.log" 2>&1 &
  pids[i]=$!
done
count_running
while [ "$RUNNING" -gt 0 ]; do
  sleep "$POLL_SECONDS"
  count_running
done
worst=0
printf '%5s  %9s  %s\n' point 'exit code' log
for i in "${!codes[@]}"; do
  printf '%5s  %9s  %s\n' "$i" "${codes[$i]}" "$SWEEP_LOG_DIR/$RUN_NAME-$i.log"
  if [ "${codes[$i]}" != 0 ]; then worst=1; fi
done
exit "$worst"
