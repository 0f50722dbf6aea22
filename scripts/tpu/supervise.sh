#!/usr/bin/env bash
# Keeps a run alive until it is done: creates the pod, sets it up, starts the command, watches it, and after a preemption
# does it all again with the same run directory.
#
#   scripts/tpu/supervise.sh lm train --gin_file configs/models/small.gin --gin_file data/pg19.gin --gin_param 'train.microbatches = 4'
#   DRY_RUN=1 scripts/tpu/supervise.sh …   prints the commands of one attempt
#
# First `lm check` on this machine: whether the step fits ACCELERATOR_TYPE (CHECK=0 skips it).
# Exit code of the run → what happens: 0 done. 2 (usage), 43 (diverged), 44 (data, tokenizer or checkpoint do not match):
# never repeated. 42 (preempted, saved), pod gone or not to be reached: again, recreating the pod if need be, with a
# growing pause, MAX_ATTEMPTS times at most. Anything else: again, MAX_FAILURES times in a row at most.
# A job that runs already is joined, so this script may be stopped and started again (put it into tmux, or on a small VM).
# The last action is to delete the pod, unless DELETE_WHEN_DONE says otherwise.
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
if [ "${1:-}" = -- ]; then shift; fi
[ $# -gt 0 ] || fail "no command; for example: $SCRIPT lm train --gin_file configs/models/small.gin"
load_settings
complete_command "$@"
case $DELETE_WHEN_DONE in
  always | success | never) ;;
  *) fail "DELETE_WHEN_DONE=$DELETE_WHEN_DONE: use always, success or never" ;;
esac

say() { echo "supervise: $(date '+%m-%d %H:%M:%S') $*"; }
trap 'say "stopped; the pod $TPU_NAME and its job go on. Join again: the same command. End: scripts/tpu/delete.sh"; exit 130' INT TERM

check_command "$@"
export CHECK=0
if is_dry; then
  "$HERE/create.sh"
  { queue_state >/dev/null; } 2>&1
  "$HERE/setup.sh"
  "$HERE/run.sh" "$@"
  on_workers all "$(job status "$RUN_NAME")"
  "$HERE/delete.sh"
  exit 0
fi

# The pod, ACTIVE and READY; $1 = fresh: not the one that is there now.
ensure_pod() {
  local fresh=$1 state creations=0 unknown=0
  while :; do
    state=$(queue_state)
    case $state in
      ABSENT)
        fresh=''
        creations=$((creations + 1))
        if [ "$creations" -gt "$MAX_FAILURES" ]; then
          say "the pod could not be created $MAX_FAILURES times"
          return 1
        fi
        say "asking for $ACCELERATOR_TYPE ($PROVISIONING) as $TPU_NAME"
        "$HERE/create.sh" || pause "$creations"
        ;;
      ACTIVE)
        if [ -z "$fresh" ] && [ "$(node_state)" = READY ]; then return 0; fi
        fresh=''
        say "recreating $TPU_NAME"
        "$HERE/delete.sh" || pause 1
        ;;
      SUSPENDED | FAILED)
        say "$TPU_NAME is $state: deleting it"
        "$HERE/delete.sh" || pause 1
        ;;
      UNKNOWN)
        unknown=$((unknown + 1))
        if [ "$unknown" -ge 60 ]; then
          say "the state of $TPU_NAME could not be asked for; it is left as it is"
          exit 1
        fi
        sleep "$POLL_SECONDS"
        ;;
      SUSPENDING | DELETING) sleep "$POLL_SECONDS" ;;
      *)
        if [ -n "$fresh" ]; then
          fresh=''
          "$HERE/delete.sh" || pause 1
        else
          wait_until_active || true
        fi
        ;;
    esac
  done
}

# Waits before try number $1: BACKOFF_SECONDS, doubled each time.
pause() {
  local seconds=$BACKOFF_SECONDS i
  for ((i = 1; i < $1 && seconds < MAX_BACKOFF_SECONDS; i++)); do seconds=$((seconds * 2)); done
  if [ "$seconds" -gt "$MAX_BACKOFF_SECONDS" ]; then seconds=$MAX_BACKOFF_SECONDS; fi
  if [ "$seconds" -gt 0 ]; then say "waiting $seconds s"; fi
  sleep "$seconds"
}

# Sets OUTCOME to the run's exit code, to `lost` (workers cannot be reached), `gone` (killed without an exit code) or
# `setup` (could not be started).
attempt() {
  local code=0
  OUTCOME=setup
  "$HERE/setup.sh" || return 0
  "$HERE/run.sh" "$@" || code=$?
  case $code in
    0) ;;
    2)
      OUTCOME=2
      return 0
      ;;
    *) return 0 ;;
  esac
  watch_job
}

watch_job() {
  local lines total running ended codes lost=0 last='' ending=0 code worst
  while :; do
    lines=$(on_workers all "$(job status "$RUN_NAME")" 2>/dev/null | grep '^lm-job ' || true)
    total=$(grep -c . <<<"$lines" || true)
    running=$(awk '$3 == "RUNNING"' <<<"$lines" | grep -c . || true)
    codes=$(awk '$3 == "EXIT" { print $4 } $3 == "LOST" || $3 == "NONE" { print "gone" }' <<<"$lines" | sort -u)
    ended=$((total - running))
    worst=''
    # What must not be repeated says more than what follows from it on the other workers.
    for code in gone $(grep -vx -e gone -e 0 <<<"$codes" || true) 42 44 43 2; do
      if grep -qx -e "$code" <<<"$codes"; then worst=$code; fi
    done
    case $worst in
      2 | 43 | 44)
        OUTCOME=$worst
        return
        ;;
    esac
    if [ "$total" -lt "$PROCESSES" ]; then
      lost=$((lost + 1))
      say "$total of $PROCESSES workers answer ($lost of $MAX_LOST_POLLS times)"
      case $(queue_state) in
        ACTIVE) ;;
        UNKNOWN) lost=0 ;; # this machine has lost its network, not the pod: the job goes on
        *) lost=$MAX_LOST_POLLS ;;
      esac
      if [ "$lost" -ge "$MAX_LOST_POLLS" ]; then
        OUTCOME=${worst:-lost}
        if [ "$OUTCOME" != 42 ]; then OUTCOME=lost; fi
        return
      fi
    else
      lost=0
      if [ "$running" = 0 ]; then
        OUTCOME=${worst:-0}
        return
      fi
      if [ -n "$worst" ]; then
        ending=$((ending + 1))
        say "$ended of $total workers ended ($worst), $running still run"
        if [ "$ending" = "$MAX_LOST_POLLS" ]; then "$HERE/run.sh" --stop || true; fi
        if [ "$ending" -gt $((2 * MAX_LOST_POLLS)) ]; then
          OUTCOME=lost
          return
        fi
      fi
    fi
    line=$(head -n 1 <<<"$lines" | cut -d ' ' -f 5-)
    if [ "$line" != "$last" ] && [ "$running" != 0 ]; then say "$line"; fi
    last=$line
    sleep "$POLL_SECONDS"
  done
}

finish() {
  local code=$1
  if [ "$code" != 0 ]; then "$HERE/logs.sh" -n 30 || true; fi
  if [ "$DELETE_WHEN_DONE" = always ] || { [ "$DELETE_WHEN_DONE" = success ] && [ "$code" = 0 ]; }; then
    "$HERE/delete.sh" || say "could not delete $TPU_NAME: do it by hand, it costs money"
  else
    if [ "$code" != 0 ]; then "$HERE/run.sh" --stop || true; fi
    say "the pod $TPU_NAME is kept and costs money; scripts/tpu/delete.sh ends it"
  fi
  exit "$code"
}

attempts=0 failures=0 short=0 fresh=''
while [ "$attempts" -lt "$MAX_ATTEMPTS" ]; do
  ensure_pod "$fresh" || finish 1
  attempts=$((attempts + 1)) began=$SECONDS fresh=''
  say "attempt $attempts of $MAX_ATTEMPTS: $(quote_all "${COMMAND[@]}")"
  attempt "$@"
  case $OUTCOME in
    0)
      say "done after $attempts attempt(s)"
      finish 0
      ;;
    2 | 43 | 44)
      say "exit code $OUTCOME is never repeated"
      finish "$OUTCOME"
      ;;
  esac
  if [ $((SECONDS - began)) -gt 1800 ]; then short=0; fi
  short=$((short + 1))
  state=$(queue_state)
  if [ "$OUTCOME" = 42 ] || [ "$OUTCOME" = lost ] || { [ "$state" != ACTIVE ] && [ "$state" != UNKNOWN ]; }; then
    failures=0
    say "preempted (outcome $OUTCOME, $TPU_NAME is $state)"
    if [ "$OUTCOME" = lost ]; then fresh=fresh; fi
  else
    failures=$((failures + 1))
    say "failed (outcome $OUTCOME), $failures of $MAX_FAILURES in a row"
    if [ "$failures" -ge "$MAX_FAILURES" ]; then
      case $OUTCOME in
        *[!0-9]*) finish 1 ;;
        *) finish "$OUTCOME" ;;
      esac
    fi
    # A machine that cannot be set up twice is a bad one.
    if [ "$OUTCOME" = setup ] && [ "$failures" -ge 2 ]; then fresh=fresh; fi
  fi
  if [ "$attempts" -lt "$MAX_ATTEMPTS" ]; then pause "$short"; fi
done
say "gave up after $attempts attempts; the same command continues the run"
finish 42
