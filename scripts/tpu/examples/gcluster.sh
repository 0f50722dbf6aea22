#!/usr/bin/env bash
# Starts the same run on Google Kubernetes Engine through Cluster Toolkit's gcluster, which replaces XPK. The image is made
# with scripts/tpu/Dockerfile. Only GKE offers TPU7x (Ironwood). It runs two containers per machine:
# ACCELERATOR_TYPE=tpu7x-128. We have not run this on a real cluster.
#
#   GCLUSTER_CLUSTER=my-cluster GCLUSTER_IMAGE=REGION-docker.pkg.dev/PROJECT/REPOSITORY/lm \
#     scripts/tpu/examples/gcluster.sh lm train --gin_file configs/models/small.gin
#   DRY_RUN=1 …   prints the command
#
# The cluster must exist: gcluster deploy with the blueprint examples/gke-tpu-v6e of the toolkit, or the one of your TPU.
# 42 (preempted, saved) and 137, 143 (killed) start a pod again, any number of times. Any other code, including 2, 43, 44
# and 45, restarts the job MAX_FAILURES times, because gcluster has no list of codes that must not be repeated. Raise
# MAX_FAILURES where machines vanish without notice.
HERE_EXAMPLES=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../common.sh
. "$HERE_EXAMPLES/../common.sh"
help_if_asked "$@"
[ -n "${GCLUSTER_CLUSTER:-}" ] || fail 'GCLUSTER_CLUSTER is not set; name the cluster'
[ -n "${GCLUSTER_IMAGE:-}" ] || fail 'GCLUSTER_IMAGE is not set; name the image'
[ $# -gt 0 ] || fail "no command; for example: $SCRIPT lm train --gin_file configs/models/small.gin"
load_settings
[ "${#RUN_NAME}" -le 28 ] || fail "RUN_NAME=$RUN_NAME: gcluster takes 28 characters at most"
complete_command "$@"
run gcluster job submit --cluster="$GCLUSTER_CLUSTER" --name="$RUN_NAME" --project="$PROJECT" --location="$ZONE" \
  --compute-type="$ACCELERATOR_TYPE" --num-slices="$SLICES" --image="$GCLUSTER_IMAGE" \
  --restarts="$MAX_FAILURES" --restart-on-exit-codes=42,137,143 --grace-period=5m \
  --command="$(quote_all "${COMMAND[@]}")"
