#!/usr/bin/env bash
# Prepares a token store on a large CPU machine in the zone of the bucket, then deletes the machine.
#
#   scripts/tpu/prepare_data.sh lm prepare --gin_file data/c4_hub.gin --set data.path=gs://bucket/tokens/c4
#   DRY_RUN=1 scripts/tpu/prepare_data.sh …   prints the commands
#
# It may be stopped and started again. It then joins the running job, or starts the job again on the machine that exists,
# and `lm prepare` continues its work. The machine deletes itself after PREPARE_MAX_DURATION in any case. The exit code is
# the exit code of the command.
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
if [ "${1:-}" = -- ]; then shift; fi
[ $# -gt 0 ] || fail "no command; for example: $SCRIPT lm prepare --gin_file data/pg19.gin"
load_settings
vm=$TPU_NAME-prepare
ssh_flags=(--quiet)
if [ "$TUNNEL_THROUGH_IAP" = 1 ]; then
  ssh_flags+=(--tunnel-through-iap)
elif [ "$INTERNAL_IPS" = 1 ]; then
  ssh_flags+=(--internal-ip)
fi
on_vm() { run gcloud compute ssh "$vm" "${LOCATION[@]}" --command="$1" "${ssh_flags[@]}" </dev/null; }
on_vm_status() { on_vm "$(job_status "$RUN_NAME-prepare" "$@")"; }
machine_state() { ask ABSENT gcloud compute instances describe "$vm" "${LOCATION[@]}" '--format=value(status)'; }
by_hand="gcloud compute instances delete $vm --zone=$ZONE --project=$PROJECT"
trap 'note "stopped; $vm goes on. Join again: the same command. End: $by_hand"; exit 130' INT TERM
# What keeps the command from being started leaves a machine that is paid for.
leave() {
  note "$*; $vm is left as it is, and costs money until $PREPARE_MAX_DURATION are over: $by_hand"
  exit "${code:-1}"
}

create=(gcloud compute instances create "$vm" "${LOCATION[@]}" --machine-type="$PREPARE_MACHINE_TYPE"
  --boot-disk-size="${PREPARE_DISK_GB}GB" --boot-disk-type=pd-ssd
  --image-family=ubuntu-2404-lts-amd64 --image-project=ubuntu-os-cloud --scopes=cloud-platform
  --max-run-duration="$PREPARE_MAX_DURATION" --instance-termination-action=DELETE)
if [ -n "$NETWORK" ]; then create+=(--network="$NETWORK"); fi
if [ -n "$SUBNETWORK" ]; then create+=(--subnet="$SUBNETWORK"); fi
if [ -n "$SERVICE_ACCOUNT" ]; then create+=(--service-account="$SERVICE_ACCOUNT"); fi
if [ "$INTERNAL_IPS" = 1 ]; then create+=(--no-address); fi

# The job's state on the machine: RUNNING, OTHER, EXIT, …, or empty if the machine cannot be reached.
set_state() {
  line=$(on_vm_status "$@" 2>/dev/null | grep '^lm-job ' || true)
  state=$(cut -d ' ' -f 3 <<<"$line")
}

code='' state='' bundle=$ROOT/build/tpu/$vm/lm.bundle
case $(machine_state) in
  ABSENT)
    pack_commit "$bundle"
    run "${create[@]}" --quiet
    ;;
  UNKNOWN)
    note "the state of $vm could not be asked for"
    exit 1
    ;;
esac
if is_dry; then
  on_vm true
else
  for ((try = 1; try <= 20; try++)); do
    set_state "$@"
    if [ -n "$state" ]; then break; fi
    sleep "$POLL_SECONDS"
  done
  [ -n "$state" ] || on_vm true || leave "cannot be reached"
fi
case $state in
  RUNNING) note "joining the job that runs on $vm" ;;
  OTHER) code=2 && leave "another command runs" ;;
  *)
    pack_commit "$bundle"
    run gcloud compute scp "$BUNDLE" "$HERE/vm/setup.sh" "$vm:" "${LOCATION[@]}" "${ssh_flags[@]}" || leave "cannot be set up"
    on_vm "bash setup.sh $(quote_all "$COMMIT" "tfds,hub${EXTRAS:+,$EXTRAS}" "$PYTHON_VERSION")" || leave "cannot be set up"
    on_vm "$(job start "$RUN_NAME-prepare" "$LOG_URL" "$@")" || leave "the command could not be started"
    ;;
esac

last=''
while [ -z "$code" ]; do
  if is_dry; then
    on_vm_status
    code=0
    break
  fi
  set_state
  case $state in
    EXIT) code=$(cut -d ' ' -f 4 <<<"$line") ;;
    RUNNING) ;;
    LOST | NONE)
      note "the command ended without an exit code; the same command continues what it had done"
      code=1
      ;;
    *)
      # A machine that does not answer continues, and ends by itself. Only a machine that no longer exists has failed.
      case $(machine_state) in
        ABSENT)
          note "$vm is gone (PREPARE_MAX_DURATION=$PREPARE_MAX_DURATION?); the same command continues what it had done"
          exit 1
          ;;
        TERMINATED | STOPPED | SUSPENDED) code=1 ;;
      esac
      ;;
  esac
  if [ "$line" != "$last" ]; then echo "${line#lm-job }"; fi
  last=$line
  if [ -z "$code" ]; then sleep "$POLL_SECONDS"; fi
done
if [ "$code" != 0 ]; then on_vm "$(job logs "$RUN_NAME-prepare" 30)" || true; fi
run gcloud compute instances delete "$vm" "${LOCATION[@]}" --quiet
exit "$code"
