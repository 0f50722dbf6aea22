#!/usr/bin/env bash
# Requests the TPU pod as a queued resource: spot, flex-start, reserved, reservation-bound or on-demand, one slice or
# several, with auto-checkpoint. settings.env decides which.
#
#   scripts/tpu/create.sh            returns at once; the request waits in the queue (free of charge)
#   scripts/tpu/create.sh --wait     returns when the pod is ACTIVE
#   DRY_RUN=1 scripts/tpu/create.sh  prints the commands
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
wait=0
case ${1:-} in
  '') ;;
  --wait) wait=1 ;;
  *) fail "$1: unknown argument; see $SCRIPT --help" ;;
esac
[ $# -le 1 ] || fail "$2: unknown argument; see $SCRIPT --help"
load_settings

[ -n "$RUNTIME_VERSION" ] ||
  fail "ACCELERATOR_TYPE=$ACCELERATOR_TYPE: is served by GKE only; see scripts/tpu/examples/gcluster.sh"
command=(gcloud)
# Auto-checkpoint, named reservations and provisioning models exist in the alpha track only.
if [ "$AUTOCHECKPOINT" = 1 ] || [ -n "$RESERVATION" ] || [ "$PROVISIONING" = flex-start ]; then command+=(alpha); fi
nodes=(--node-id="$TPU_NAME")
if [ "$SLICES" -gt 1 ]; then nodes=(--node-count="$SLICES" --node-prefix="$TPU_NAME"); fi
command+=(compute tpus queued-resources create "$TPU_NAME" "${nodes[@]}" "${LOCATION[@]}"
  --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION")
case $PROVISIONING in
  spot) command+=(--spot) ;;
  reserved) command+=(--reserved) ;;
  reservation-bound)
    [ -n "$RESERVATION" ] || fail "PROVISIONING=$PROVISIONING: needs RESERVATION, the name of the reservation"
    command+=(--provisioning-model=reservation-bound)
    ;;
  flex-start)
    [ -n "$MAX_RUN_DURATION" ] || fail "PROVISIONING=$PROVISIONING: needs MAX_RUN_DURATION, at most 7d"
    command+=(--provisioning-model=flex-start --max-run-duration="$MAX_RUN_DURATION")
    ;;
  on-demand) ;;
  *) fail "PROVISIONING=$PROVISIONING: use spot, flex-start, reserved, reservation-bound or on-demand" ;;
esac
if [ -n "$RESERVATION" ]; then
  case $PROVISIONING in
    reserved | reservation-bound) command+=(--reservation="$RESERVATION") ;;
    *) fail "RESERVATION=$RESERVATION: needs PROVISIONING=reserved or reservation-bound" ;;
  esac
fi
if [ "$AUTOCHECKPOINT" = 1 ]; then command+=(--autocheckpoint-enabled); fi
if [ -n "$VALID_UNTIL_DURATION" ]; then command+=(--valid-until-duration="$VALID_UNTIL_DURATION"); fi
if [ -n "$NETWORK" ]; then command+=(--network="$NETWORK"); fi
if [ -n "$SUBNETWORK" ]; then command+=(--subnetwork="$SUBNETWORK"); fi
if [ -n "$SERVICE_ACCOUNT" ]; then
  command+=(--service-account="$SERVICE_ACCOUNT" --scopes=https://www.googleapis.com/auth/cloud-platform)
fi
if [ "$INTERNAL_IPS" = 1 ]; then command+=(--internal-ips); fi
run "${command[@]}" --quiet
own_pod
if [ "$wait" = 1 ]; then
  wait_until_active || {
    note "$TPU_NAME did not become ACTIVE; ask why with scripts/tpu/status.sh"
    exit 1
  }
fi
