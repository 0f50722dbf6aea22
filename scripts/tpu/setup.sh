#!/usr/bin/env bash
# Puts the last commit of this checkout on every worker of the pod and installs it into ~/lm/.venv (idempotent).
#
#   scripts/tpu/setup.sh
#   DRY_RUN=1 scripts/tpu/setup.sh   prints the commands
#
# The commit travels as a git bundle, so that run.json on the pod names it. The script refuses uncommitted changes.
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
[ $# = 0 ] || fail "$1: unknown argument; see $SCRIPT --help"
load_settings
pack_commit
tpu_vm scp "$BUNDLE" "$HERE/vm/setup.sh" "$TPU_NAME:" --worker=all
if [ -n "$ENV_FILE" ]; then tpu_vm scp "$ENV_FILE" "$TPU_NAME:lm-env.new" --worker=all; fi
on_workers all "bash setup.sh $(quote_all "$COMMIT" "tpu${EXTRAS:+,$EXTRAS}" "$PYTHON_VERSION")"
