#!/usr/bin/env bash
# Prepares a token store on a large CPU machine in the zone of the bucket, then deletes the machine.
#
#   scripts/tpu/prepare_data.sh lm prepare --gin_file data/c4.gin --gin_param "data.path = 'gs://bucket/tokens/c4'"
#   DRY_RUN=1 scripts/tpu/prepare_data.sh …   prints the commands
#
# May be stopped and started again: it joins the machine that is there, and `lm prepare` continues what it had done.
# The machine deletes itself after PREPARE_MAX_DURATION in any case. Exit code: that of the command.
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
trap 'note "stopped; $vm goes on. Join again: the same command. End: gcloud compute instances delete $vm --zone=$ZONE --project=$PROJECT"; exit 130' INT TERM

commit=$(shipped_commit)
create=(gcloud compute instances create "$vm" "${LOCATION[@]}" --machine-type="$PREPARE_MACHINE_TYPE"
  --boot-disk-size="${PREPARE_DISK_GB}GB" --boot-disk-type=pd-ssd
  --image-family=ubuntu-2404-lts-amd64 --image-project=ubuntu-os-cloud --scopes=cloud-platform
  --max-run-duration="$PREPARE_MAX_DURATION" --instance-termination-action=DELETE)
if [ -n "$NETWORK" ]; then create+=(--network="$NETWORK"); fi
if [ -n "$SUBNETWORK" ]; then create+=(--subnet="$SUBNETWORK"); fi
if [ -n "$SERVICE_ACCOUNT" ]; then create+=(--service-account="$SERVICE_ACCOUNT"); fi
if [ "$INTERNAL_IPS" = 1 ]; then create+=(--no-address); fi
if is_dry || ! gcloud compute instances describe "$vm" "${LOCATION[@]}" >/dev/null 2>&1; then run "${create[@]}" --quiet; fi
for ((try = 1; try <= 20; try++)); do
  if on_vm true; then break; fi
  [ "$try" -lt 20 ] || { note "$vm cannot be reached; delete it with gcloud compute instances delete $vm" && exit 1; }
  sleep "$POLL_SECONDS"
done

bundle=$ROOT/build/tpu/$vm/lm.bundle
make_bundle "$bundle"
run gcloud compute scp "$bundle" "$HERE/vm/setup.sh" "$vm:" "${LOCATION[@]}" "${ssh_flags[@]}"
on_vm "bash setup.sh $(quote_all "$commit" tfds "$PYTHON_VERSION")"
on_vm "$(job start "$RUN_NAME-prepare" "$LOG_URL" "$@")"

code='' last='' lost=0
while [ -z "$code" ]; do
  if is_dry; then
    on_vm "$(job status "$RUN_NAME-prepare")"
    code=0
    break
  fi
  line=$(on_vm "$(job status "$RUN_NAME-prepare")" 2>/dev/null | grep '^lm-job ' || true)
  state=$(cut -d ' ' -f 3 <<<"$line")
  case $state in
    EXIT) code=$(cut -d ' ' -f 4 <<<"$line") ;;
    RUNNING) lost=0 ;;
    *)
      lost=$((lost + 1))
      if [ "$lost" -ge "$MAX_LOST_POLLS" ]; then code=1; fi
      ;;
  esac
  if [ "$line" != "$last" ]; then echo "${line#lm-job }"; fi
  last=$line
  if [ -z "$code" ]; then sleep "$POLL_SECONDS"; fi
done
if [ "$code" != 0 ]; then on_vm "$(job logs "$RUN_NAME-prepare" 30)" || true; fi
run gcloud compute instances delete "$vm" "${LOCATION[@]}" --quiet
exit "$code"
