#!/usr/bin/env bash
# Keeps a run alive until it is done: creates the pod, sets it up, starts the command and watches it. After a preemption it
# does all of this again with the same run directory.
#
#   scripts/tpu/supervise.sh lm train --gin_file configs/models/small.gin --gin_file data/pg19.gin --set data.path=gs://BUCKET/tokens/pg19 --set train.microbatches=4
#   DRY_RUN=1 scripts/tpu/supervise.sh …   prints the commands of one attempt
#
# First runs `lm check` on this machine, to see whether the tokens are there and the step fits ACCELERATOR_TYPE
# (CHECK=0 skips it).
#
# Exit code of the run → what happens:
#   0                 done
#   2, 43, 44         never repeated: usage; diverged; data, tokenizer or checkpoint do not match
#   42, no pod        again: preempted and saved, or the pod is gone or cannot be reached. Recreates the pod if necessary.
#                     The pause grows. MAX_ATTEMPTS times at most.
#   45                again on a new pod, MAX_FAILURES times in a row at most: chips of this one compute wrongly
#   anything else     again, MAX_FAILURES times in a row at most
#
# An attempt of RESET_SECONDS or more resets the count of failures in a row and the pauses.
# The script joins a running job unchanged, so it may be stopped and started again (put it into tmux, or on a small VM).
# It uses the settings and the commit of its first start. Edits while it runs are not part of the run.
# The run directory must outlive the machines: gs://, s3://, or an absolute path on a disk that they share.
# The last action is to delete the pod, unless DELETE_WHEN_DONE forbids it. The script deletes no pod because a query
# failed, no pod on which another command runs, and no pod that this checkout neither created nor started a job on.
# Where no worker answers, it asks the run's lease (lock.json in RUN_DIR): a run that renews it goes on.
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
if [ "${1:-}" = -- ]; then shift; fi
[ $# -gt 0 ] || fail "no command; for example: $SCRIPT lm train --gin_file configs/models/small.gin"
load_settings
complete_command "$@"
check_run_dir "${COMMAND[@]}"
case $DELETE_WHEN_DONE in
  always | success | never) ;;
  *) fail "DELETE_WHEN_DONE=$DELETE_WHEN_DONE: use always, success or never" ;;
esac

say() { echo "supervise: $(date '+%m-%d %H:%M:%S') $*"; }
trap 'say "stopped; the pod $TPU_NAME and its job go on. Join again: the same command. End: scripts/tpu/delete.sh"; exit 130' INT TERM

if is_dry; then
  check_command "$@"
  export CHECK=0
  "$HERE/create.sh"
  { queue_state >/dev/null; } 2>&1
  "$HERE/setup.sh"
  "$HERE/run.sh" "$@"
  on_workers all "$(job_status "$RUN_NAME")"
  "$HERE/delete.sh"
  exit 0
fi

# Sets STATUS to one line per worker that answers. With a command, the state is OTHER where another command runs.
ask_workers() { STATUS=$(on_workers all "$(job_status "$RUN_NAME" "$@")" 2>/dev/null | grep '^lm-job ' || true); }
# Counts the answers in this state, or all answers.
count() { awk -v state="${1:-}" 'NF && (state == "" || $3 == state) { n++ } END { print n + 0 }' <<<"$STATUS"; }

# True if the job runs already. A pod on which another command runs is left alone.
joins() {
  ask_workers "${COMMAND[@]}"
  if [ "$(count)" -gt 0 ]; then is_known=1; fi
  if [ "$(count OTHER)" -gt 0 ]; then
    say "another command runs on $TPU_NAME, which is left as it is: $(awk '$3 == "OTHER"' <<<"$STATUS" | head -n 1 | cut -d ' ' -f 6-)"
    say "scripts/tpu/run.sh --stop ends it, with the RUN_DIR or RUN_NAME that it was started with"
    exit 2
  fi
  [ "$(count RUNNING)" -gt 0 ] && is_joined=1
}

# The commit that the run was started from, if this script joined it and still has the commit. Otherwise the last one.
pack() {
  local bundle
  bundle=$(pod_folder)/lm.bundle
  if [ -n "$is_joined" ] && [ -z "${LM_TPU_COMMIT:-}" ] && [ -f "$bundle" ]; then
    LM_TPU_COMMIT=$(git -C "$ROOT" bundle list-heads "$bundle" | cut -d ' ' -f 1)
    export LM_TPU_COMMIT LM_TPU_BUNDLE=$bundle
  fi
  pack_commit
}

# Deletes the pod, if it may, and says why.
remove_pod() {
  if ! owns_pod; then
    say "$TPU_NAME was not created from this checkout, and is left as it is ($1); scripts/tpu/delete.sh deletes it"
    exit 1
  fi
  if renews_lease; then
    say "the run in $RUN_DIR renews its lease: $TPU_NAME is left as it is ($1)"
    return
  fi
  say "deleting $TPU_NAME: $1"
  "$HERE/delete.sh" || pause 1
}

# Makes the pod ACTIVE and READY. $1 = fresh: another pod than the present one.
ensure_pod() {
  local fresh=$1 state node creations=0 unknown=0 repairing=0
  while :; do
    state=$(queue_state)
    node=''
    if [ "$state" = ACTIVE ] && [ -z "$fresh" ]; then node=$(node_state); fi
    case $state,$node in
      ABSENT,)
        fresh='' is_known=1
        creations=$((creations + 1))
        if [ "$creations" -gt "$MAX_FAILURES" ]; then
          say "the pod could not be created $MAX_FAILURES times"
          return 1
        fi
        say "asking for $ACCELERATOR_TYPE ($PROVISIONING) as $TPU_NAME"
        "$HERE/create.sh" || pause "$creations"
        ;;
      ACTIVE,READY) return 0 ;;
      UNKNOWN, | ACTIVE,UNKNOWN)
        unknown=$((unknown + 1))
        if [ "$unknown" -ge 60 ]; then
          say "the state of $TPU_NAME could not be asked for; it is left as it is"
          exit 1
        fi
        sleep "$POLL_SECONDS"
        ;;
      ACTIVE,*ING)
        # STARTING, REPAIRING, …: in most cases these machines come back by themselves.
        repairing=$((repairing + 1))
        if [ "$repairing" -ge 30 ]; then fresh=fresh; fi
        sleep "$POLL_SECONDS"
        ;;
      ACTIVE,* | SUSPENDED, | FAILED,)
        fresh=''
        remove_pod "it is $state${node:+, its machines $node}"
        ;;
      SUSPENDING, | DELETING,) sleep "$POLL_SECONDS" ;;
      *)
        if [ -n "$fresh" ]; then
          fresh=''
          remove_pod "another one takes its place"
        else
          wait_until_active || sleep "$POLL_SECONDS"
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
  local polls=0
  OUTCOME=setup
  # New machines, or a network that is down: they answer a while later.
  until joins || [ "$(count)" = "$PROCESSES" ] || [ "$polls" -ge "$MAX_LOST_POLLS" ]; do
    polls=$((polls + 1))
    sleep "$POLL_SECONDS"
  done
  if [ "$(count RUNNING)" -gt 0 ] && [ "$(count NONE)" = 0 ]; then
    say "joining the job that runs on $TPU_NAME"
  else
    # This also covers a worker that was not reached when the others started. For the others both commands do nothing.
    pack
    "$HERE/setup.sh" || return 0
    "$HERE/run.sh" "$@" || return 0
  fi
  own_pod
  watch_job
}

watch_job() {
  local total running ended codes lost=0 last='' ending=0 code worst crash
  while :; do
    ask_workers
    total=$(count) running=$(count RUNNING)
    codes=$(awk '$3 == "EXIT" { print $4 } $3 == "LOST" || $3 == "NONE" { print "gone" }' <<<"$STATUS" | sort -u)
    ended=$((total - running))
    worst=''
    # A code that must not be repeated is the cause. The codes of the other workers follow from it.
    for code in gone $(grep -vx -e gone -e 0 <<<"$codes" || true) 42 45 44 43 2; do
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
      if [ "$lost" -ge "$MAX_LOST_POLLS" ] && [ -z "$worst" ] && renews_lease; then
        say "the run renews its lease, so it is healthy: it is this machine that does not reach $TPU_NAME"
        lost=0
      fi
      if [ "$lost" -ge "$MAX_LOST_POLLS" ]; then
        OUTCOME=${worst:-lost}
        if [ "$OUTCOME" != 42 ]; then OUTCOME=lost; fi
        return
      fi
    else
      lost=0
      if [ "$running" = 0 ]; then
        OUTCOME=${worst:-0}
        # Workers save and end with 42 where another one crashed. On machines that are all there, the crash is the cause.
        crash=$(grep -vx -e gone -e 0 -e 42 -e 143 <<<"$codes" | head -n 1 || true)
        if [ "$OUTCOME" = 42 ] && [ -n "$crash" ] && [ "$(queue_state),$(node_state)" = ACTIVE,READY ]; then OUTCOME=$crash; fi
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
    line=$(head -n 1 <<<"$STATUS" | cut -d ' ' -f 5-)
    if [ "$line" != "$last" ] && [ "$running" != 0 ]; then say "$line"; fi
    last=$line
    sleep "$POLL_SECONDS"
  done
}

# Shows the end of the log of the workers that ended with the code $1, or of worker 0 where none did.
show_log() {
  local lines
  lines=$(on_workers all "$(job ended "$RUN_NAME" "$1" 30)" 2>/dev/null | head -n 120 || true)
  if [ -n "$lines" ]; then echo "$lines"; else "$HERE/logs.sh" -n 30 || true; fi
}

finish() {
  local code=$1
  # No worker said how the run ended: it may go on.
  if [[ ${OUTCOME:-none} == *[!0-9]* ]] && renews_lease; then
    say "the run in $RUN_DIR renews its lease: $TPU_NAME is left as it is, and costs money"
    exit "$code"
  fi
  if [ "$code" != 0 ]; then show_log "$code"; fi
  if [ "$DELETE_WHEN_DONE" = always ] || { [ "$DELETE_WHEN_DONE" = success ] && [ "$code" = 0 ]; }; then
    "$HERE/delete.sh" || say "could not delete $TPU_NAME: do it by hand, it costs money"
  else
    if [ "$code" != 0 ]; then "$HERE/run.sh" --stop || true; fi
    say "the pod $TPU_NAME is kept and costs money; scripts/tpu/delete.sh ends it"
  fi
  exit "$code"
}

# is_known: this script has created the pod, or one of its workers has answered. is_joined: the job was already running.
attempts=0 failures=0 short=0 fresh='' is_known='' is_joined=''
if [ "$(queue_state)" = ABSENT ] || ! joins; then
  check_command "$@"
  pack
fi
export CHECK=0
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
  if [ $((SECONDS - began)) -ge "$RESET_SECONDS" ]; then short=0 failures=0; fi
  short=$((short + 1))
  state=$(queue_state)
  if [ "$OUTCOME" = setup ] && [ "$state" = UNKNOWN ]; then
    say "this machine reaches neither $TPU_NAME nor the service"
  elif [ "$OUTCOME" = setup ] && renews_lease; then
    say "this machine does not reach $TPU_NAME, whose run renews its lease"
  elif [ "$OUTCOME" = 42 ] || [ "$OUTCOME" = lost ] || { [ "$state" != ACTIVE ] && [ "$state" != UNKNOWN ]; }; then
    failures=0
    say "preempted (outcome $OUTCOME, $TPU_NAME is $state)"
    if [ "$OUTCOME" = lost ]; then fresh=fresh; fi
  else
    failures=$((failures + 1))
    say "failed (outcome $OUTCOME), $failures of $MAX_FAILURES in a row"
    if [ "$failures" -ge "$MAX_FAILURES" ]; then
      if [ -z "$is_known" ]; then
        say "no worker of $TPU_NAME ever answered here; a run may go on there, so it is left as it is, and costs money"
        exit 1
      fi
      case $OUTCOME in
        *[!0-9]*) finish 1 ;;
        *) finish "$OUTCOME" ;;
      esac
    fi
    # A machine whose set-up fails twice is a bad one.
    if [ "$OUTCOME" = 45 ]; then
      say "chips of $TPU_NAME compute wrongly: taking another pod"
      fresh=fresh
    fi
    if [ "$OUTCOME" = setup ] && [ "$failures" -ge 2 ] && [ -n "$is_known" ]; then fresh=fresh; fi
  fi
  if [ "$attempts" -lt "$MAX_ATTEMPTS" ]; then pause "$short"; fi
done
say "gave up after $attempts attempts; the same command continues the run"
finish 42
