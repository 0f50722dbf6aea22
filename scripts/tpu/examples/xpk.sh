#!/usr/bin/env bash
# Starts the same run on Google Kubernetes Engine through XPK. The image is made with scripts/tpu/Dockerfile. Google is
# replacing XPK by Cluster Toolkit: see gcluster.sh beside this file. Only GKE offers TPU7x (Ironwood). It runs two
# containers per machine: ACCELERATOR_TYPE=tpu7x-128, or by its shape of chips, tpu7x-4x4x4. We have not run this on a real
# cluster.
#
#   XPK_CLUSTER=my-cluster XPK_IMAGE=REGION-docker.pkg.dev/PROJECT/REPOSITORY/lm \
#     scripts/tpu/examples/xpk.sh lm train --gin_file configs/models/small.gin
#   DRY_RUN=1 …   prints the command
#
# The cluster must exist: xpk cluster create --cluster=… --tpu-type=… --num-slices=1 --spot
# XPK by itself starts the workload again after 42 (preempted, saved) and 127 to 255 (killed by a signal or for memory).
# --restart-on-exit-codes adds to these codes and documents here which count. 1, 2, 43, 44 and 45
# (chips compute wrongly: ask for other nodes) end it.
HERE_EXAMPLES=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../common.sh
. "$HERE_EXAMPLES/../common.sh"
help_if_asked "$@"
[ -n "${XPK_CLUSTER:-}" ] || fail 'XPK_CLUSTER is not set; name the cluster'
[ -n "${XPK_IMAGE:-}" ] || fail 'XPK_IMAGE is not set; name the image'
[ $# -gt 0 ] || fail "no command; for example: $SCRIPT lm train --gin_file configs/models/small.gin"
load_settings
complete_command "$@"
run xpk workload create --cluster="$XPK_CLUSTER" --workload="$RUN_NAME" "${LOCATION[@]}" \
  --tpu-type="$ACCELERATOR_TYPE" --num-slices="$SLICES" --docker-image="$XPK_IMAGE" \
  --max-restarts="$MAX_ATTEMPTS" --restart-on-exit-codes=42 --termination-grace-period-seconds=300 \
  --command="$(quote_all "${COMMAND[@]}")"
