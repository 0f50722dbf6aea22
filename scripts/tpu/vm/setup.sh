#!/usr/bin/env bash
# Runs on a machine of the pod. Checks out a commit of ~/lm.bundle into ~/lm and installs it into ~/lm/.venv.
#
#   bash setup.sh COMMIT EXTRAS PYTHON_VERSION
set -euo pipefail
commit=$1 extras=$2 python=$3
cd "$HOME"
# The variables of ENV_FILE, for jobs alone. Without the setting none are left from earlier.
rm -f .lm-env
if [ -f lm-env.new ]; then
  chmod 600 lm-env.new
  mv lm-env.new .lm-env
fi
ready=lm/.venv/.lm-ready
if [ "$(cat "$ready" 2>/dev/null)" = "$commit $extras $python" ]; then
  echo "$(hostname): lm $commit is ready"
  exit 0
fi

# Networks and package mirrors fail now and then. On a pod of 64 machines one of them always fails.
retry() {
  local try
  for try in 1 2 3; do
    if "$@"; then return 0; fi
    sleep $((try * ${RETRY_SECONDS:-10}))
  done
  echo "$(hostname): failed three times: $*" >&2
  return 1
}
apt_install() { sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; }

command -v git >/dev/null || retry apt_install git
git init --quiet lm
git -C lm fetch --quiet "$HOME/lm.bundle" HEAD
git -C lm checkout --quiet --force --detach "$commit"

# uv brings its own Python where the image has an older one (the TPU images of today have 3.10).
uv=$(command -v uv || echo "$HOME/.lm-uv/bin/uv")
if [ ! -x "$uv" ]; then
  python3 -m venv .lm-uv 2>/dev/null || { retry apt_install python3-venv && python3 -m venv .lm-uv; }
  retry .lm-uv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi
if [ ! -x lm/.venv/bin/python ] || [ "$(cat lm/.venv/.lm-python 2>/dev/null)" != "$python" ]; then
  rm -rf lm/.venv
  retry "$uv" venv --quiet --python "$python" lm/.venv
  echo "$python" >lm/.venv/.lm-python
fi
retry "$uv" pip install --quiet --python lm/.venv/bin/python -c lm/scripts/constraints.txt -e "lm[$extras]"
lm/.venv/bin/lm --help >/dev/null
echo "$commit $extras $python" >"$ready"
echo "$(hostname): lm $commit is ready"
