#!/usr/bin/env bash
# Asks for the TPU pod as a queued resource: spot, reserved or on-demand, with auto-checkpoint, as settings.env says.
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
load_settings

command=(gcloud)
# Auto-checkpoint and named reservations exist in the alpha track only.
if [ "$AUTOCHECKPOINT" = 1 ] || [ -n "$RESERVATION" ]; then command+=(alpha); fi
command+=(compute tpus queued-resources create "$TPU_NAME" --node-id="$TPU_NAME" "${LOCATION[@]}"
  --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION")
case $PROVISIONING in
  spot) command+=(--spot) ;;
  reserved) command+=(--reserved) ;;
  on-demand) ;;
  *) fail "PROVISIONING=$PROVISIONING: use spot, reserved or on-demand" ;;
esac
if [ -n "$RESERVATION" ]; then
  [ "$PROVISIONING" = reserved ] || fail "RESERVATION=$RESERVATION: needs PROVISIONING=reserved"
  command+=(--reservation="$RESERVATION")
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
if [ "$wait" = 1 ]; then
  wait_until_active || {
    note "$TPU_NAME did not become ACTIVE; ask why with scripts/tpu/status.sh"
    exit 1
  }
fi
