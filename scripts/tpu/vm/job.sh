#!/usr/bin/env bash
# Runs on a machine of the pod. Manages one detached job, its log and its exit code, in ~/lm-jobs/NAME.
#
#   job.sh start NAME LOG_URL COMMAND…    returns at once; does nothing if the same command runs already
#   job.sh status NAME [COMMAND…]         one line:  lm-job HOST RUNNING|EXIT|LOST|NONE CODE  last line of the log
#                                         OTHER where another command runs, as this job or as another one
#   job.sh stop NAME                      SIGTERM: the run saves and ends with 42
#   job.sh logs NAME LINES|all [follow]
#   job.sh stacks NAME                    makes the run print the stacks of all its threads, and shows them; it goes on
#   job.sh ended NAME CODE LINES          the last lines of the log, if the job ended with this code
set -euo pipefail
verb=$1 name=$2
shift 2
folder=$HOME/lm-jobs/$name

# is_alive [FOLDER]: the job of this name runs, or the job of another folder.
is_alive() {
  local pid
  pid=$(cat "${1:-$folder}/pid" 2>/dev/null) || return 1
  # After a reboot the number may belong to somebody else.
  kill -0 "$pid" 2>/dev/null && [[ $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) == *'job.sh watch '* ]]
}
# Prints the name of another job that runs, if one does. Chips serve one process, and its sources must not change.
other_job() {
  local other
  for other in "$HOME"/lm-jobs/*/; do
    other=${other%/}
    if [ "$other" != "$folder" ] && is_alive "$other"; then
      basename "$other"
      return
    fi
  done
}
upload() { if [ -n "$1" ]; then gcloud storage cp --quiet "$folder/log" "$1/$name/$(hostname).log" >/dev/null 2>&1 || true; fi; }

case $verb in
  start)
    url=$1
    shift
    mkdir -p "$folder"
    printf '%q ' "$@" >"$folder/command.new"
    # gcloud repeats a command whose connection broke: starting twice must be the same as starting once.
    if is_alive; then
      if cmp -s "$folder/command" "$folder/command.new"; then
        echo "$(hostname): already running"
        exit 0
      fi
      echo "$(hostname): another command of the job $name runs; stop it with scripts/tpu/run.sh --stop" >&2
      exit 2
    fi
    other=$(other_job)
    if [ -n "$other" ]; then
      echo "$(hostname): the job $other runs; stop it with RUN_NAME=$other scripts/tpu/run.sh --stop" >&2
      exit 2
    fi
    mv "$folder/command.new" "$folder/command"
    rm -f "$folder/exit_code"
    setsid nohup bash "$0" watch "$name" "$url" "$@" </dev/null >>"$folder/log" 2>&1 &
    echo $! >"$folder/pid"
    # The next query of its state finds it running, however slow the machine is.
    for ((try = 0; try < 100; try++)); do
      if is_alive || [ -f "$folder/exit_code" ]; then break; fi
      sleep 0.1
    done
    echo "$(hostname): started"
    ;;
  watch)
    url=$1
    shift
    cd "$HOME/lm"
    export PATH=$HOME/lm/.venv/bin:$PATH PYTHONUNBUFFERED=1
    if [ -f "$HOME/.lm-env" ]; then
      set -a
      # shellcheck disable=SC1091
      . "$HOME/.lm-env"
      set +a
    fi
    echo "== $(date -u '+%Y-%m-%d %H:%M:%S') UTC  $(cat "$folder/command")"
    copier=''
    if [ -n "$url" ]; then
      (while sleep 60; do upload "$url"; done) &
      copier=$!
    fi
    child='' signalled=''
    trap 'signalled=1; kill -TERM "$child" 2>/dev/null || true' TERM
    "$@" &
    child=$!
    while :; do
      signalled='' code=0
      wait "$child" || code=$?
      # A signal ends `wait` although the run still saves.
      if [ -z "$signalled" ]; then break; fi
    done
    echo "== exit code $code"
    if [ -n "$copier" ]; then kill "$copier" 2>/dev/null || true; fi
    upload "$url"
    echo "$code" >"$folder/exit_code.new"
    mv "$folder/exit_code.new" "$folder/exit_code"
    ;;
  status)
    state=NONE code=- last=$folder
    # In this order: a job that ends between the two queries has left its exit code by the second.
    if is_alive && [ ! -f "$folder/exit_code" ]; then
      state=RUNNING
      if [ $# -gt 0 ] && [ "$(printf '%q ' "$@")" != "$(cat "$folder/command")" ]; then state=OTHER; fi
    elif [ -f "$folder/exit_code" ]; then
      state=EXIT code=$(cat "$folder/exit_code")
    elif [ -d "$folder" ]; then
      state=LOST
    fi
    if [ $# -gt 0 ] && [ "$state" != RUNNING ]; then
      other=$(other_job)
      if [ -n "$other" ]; then state=OTHER code=- last=$HOME/lm-jobs/$other; fi
    fi
    echo "lm-job $(hostname) $state $code  $(tail -n 1 "$last/log" 2>/dev/null | tr '\r' '\n' | tail -n 1 | cut -c 1-200)"
    ;;
  stop)
    if is_alive; then
      kill -TERM "$(cat "$folder/pid")"
      echo "$(hostname): asked to stop"
    else
      echo "$(hostname): not running"
    fi
    ;;
  stacks)
    # The signal kills a program that does not expect it: /proc says which signals a process handles (bit 9: SIGUSR1).
    child=''
    for pid in $(pgrep -P "$(cat "$folder/pid" 2>/dev/null || echo 0)" || true); do
      if (($((0x$(awk '$1 == "SigCgt:" { print $2 }' "/proc/$pid/status" 2>/dev/null || echo 0))) & 0x200)); then child=$pid; fi
    done
    if ! is_alive || [ -z "$child" ]; then
      echo "$(hostname): no lm runs here"
      exit 0
    fi
    before=$(wc -c <"$folder/log")
    kill -USR1 "$child"
    sleep 2
    tail -c +$((before + 1)) "$folder/log" | sed "s/^/$(hostname): /"
    ;;
  logs)
    if [ "$1" = all ]; then
      cat "$folder/log"
    elif [ "${2:-}" = follow ]; then
      exec tail -n "$1" -F "$folder/log"
    else
      tail -n "$1" "$folder/log"
    fi
    ;;
  ended)
    if [ "$(cat "$folder/exit_code" 2>/dev/null)" = "$1" ]; then tail -n "$2" "$folder/log" | sed "s/^/$(hostname): /"; fi
    ;;
  *)
    echo "job.sh: $verb: unknown verb" >&2
    exit 2
    ;;
esac
