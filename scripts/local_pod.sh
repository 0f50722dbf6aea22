#!/usr/bin/env bash
# Rehearses a pod on this machine: runs the same command as N processes that communicate through gloo on the CPU.
#
#   scripts/local_pod.sh 2 -- lm train --gin_file configs/experiments/quickstart.gin --run_dir runs/pod
#   scripts/local_pod.sh --devices 4 --only 0 2 -- lm train …
#
#   --devices D   simulated devices per process (default 1)
#   --only I      show the output of process I alone; the output of the others appears if they fail
#
# Adds --coordinator_address, --process_count and --process_id to the command. Lines begin with the number of their
# process. When one process fails, the others get SIGTERM, and SIGKILL after LOCAL_POD_GRACE (20) seconds. SIGTERM and
# Ctrl-C reach all of them as SIGTERM: the run saves and ends with 42. The exit code is the code of the first that failed.
set -euo pipefail
name=$(basename "$0")
fail() {
  echo "$name: $*" >&2
  exit 2
}
devices=1 only='' grace=${LOCAL_POD_GRACE:-20}
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"
      exit 0
      ;;
    --devices | --only)
      [ $# -ge 2 ] || fail "$1: give a number"
      if [ "$1" = --only ]; then only=$2; else devices=$2; fi
      shift
      ;;
    *) break ;;
  esac
  shift
done
count=${1:-}
[[ $count =~ ^[1-9][0-9]*$ ]] || fail "'$count': give the number of processes, for example: scripts/local_pod.sh 2 -- lm train …"
[[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices '$devices': give a number"
[[ -z $only || $only =~ ^[0-9]+$ ]] || fail "--only '$only': give the number of a process"
shift
if [ "${1:-}" = -- ]; then shift; fi
[ $# -gt 0 ] || fail 'no command; for example: scripts/local_pod.sh 2 -- lm train …'
command -v "$1" >/dev/null || fail "$1: no such command; install the package, or activate its environment"

# Unbuffered: the lines go through a pipe and should appear when they are written.
export JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1
# This script sets the number of devices; other XLA flags stay.
kept=''
for flag in ${XLA_FLAGS:-}; do
  case $flag in --xla_force_host_platform_device_count=*) ;; *) kept="$kept $flag" ;; esac
done
export XLA_FLAGS="--xla_force_host_platform_device_count=$devices$kept"

port=''
for _ in 1 2 3 4 5 6 7 8 9 10; do
  # Nobody answers, so the port is free. It stays free, because the system gives connections ports above 32,767.
  candidate=$((20000 + RANDOM % 12000))
  if ! (exec 3<>"/dev/tcp/127.0.0.1/$candidate") 2>/dev/null; then
    port=$candidate
    break
  fi
done
[ -n "$port" ] || fail 'no free port found'

folder=$(mktemp -d "${TMPDIR:-/tmp}/local_pod.XXXXXX")
pids=() readers=() codes=()
# shellcheck disable=SC2329
clean_up() {
  local pid
  for pid in ${pids[@]+"${pids[@]}"}; do kill -KILL "$pid" 2>/dev/null || true; done
  rm -rf "$folder"
}
trap clean_up EXIT
terminated=''
terminate() {
  local i
  terminated=1
  for i in ${pids[@]+"${!pids[@]}"}; do
    if [ -z "${codes[$i]:-}" ]; then kill -TERM "${pids[$i]}" 2>/dev/null || true; fi
  done
}
trap terminate TERM INT

show() { # the output of process $1
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    if [ -z "$only" ] || [ "$only" = "$1" ]; then
      printf '[%s] %s\n' "$1" "$line"
    else
      printf '%s\n' "$line" >>"$folder/$1.log"
    fi
  done
}

exec 3>&2 2>/dev/null # or bash shows a line of this script for a process that was killed
for ((i = 0; i < count; i++)); do
  mkfifo "$folder/$i"
  # The readers outlive a Ctrl-C, to show what the processes print while they save.
  (trap '' TERM INT && show "$i" <"$folder/$i") 3>&- &
  readers[i]=$!
  "$@" --coordinator_address "localhost:$port" --process_count "$count" --process_id "$i" </dev/null >"$folder/$i" 2>&1 3>&- &
  pids[i]=$!
done

first='' deadline='' alive=$count
while [ "$alive" -gt 0 ]; do
  sleep 0.1 || true
  alive=0
  for ((i = 0; i < count; i++)); do
    if [ -n "${codes[$i]:-}" ]; then continue; fi
    if kill -0 "${pids[$i]}" 2>/dev/null; then
      alive=$((alive + 1))
      continue
    fi
    codes[i]=0
    wait "${pids[$i]}" || codes[i]=$?
    # If several ended at the same instant, the one that gives a reason counts.
    case ${codes[$i]} in
      0) ;;
      2 | 4[234]) if [ -z "$deadline" ]; then first=${codes[$i]}; fi ;;
      *) : "${first:=${codes[$i]}}" ;;
    esac
  done
  if [ -n "$first" ] && [ -z "$deadline" ] && [ "$alive" -gt 0 ]; then
    deadline=$((SECONDS + grace))
    if [ -z "$terminated" ]; then terminate; fi
  fi
  if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ "$alive" -gt 0 ]; then
    echo "$name: killing $alive process(es) that did not end within $grace s" >&3
    for ((i = 0; i < count; i++)); do
      if [ -z "${codes[$i]:-}" ]; then kill -KILL "${pids[$i]}" 2>/dev/null || true; fi
    done
    deadline=$((SECONDS + grace))
  fi
done
exec 2>&3 3>&-
for reader in "${readers[@]}"; do wait "$reader" || true; done
if [ -n "$first" ]; then
  for ((i = 0; i < count; i++)); do
    if [ "${codes[$i]}" != 0 ]; then
      if [ -s "$folder/$i.log" ]; then tail -n 20 "$folder/$i.log" | sed "s/^/[$i] /"; fi
      echo "$name: process $i ended with exit code ${codes[$i]}" >&2
    fi
  done
fi
exit "${first:-0}"
