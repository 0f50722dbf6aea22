#!/usr/bin/env bash
# From a fresh machine to a trained and evaluated language model in about four minutes on two idle CPU cores. It makes
# .venv, installs the package, and prepares the Python sources of your interpreter as text. Then it trains a small model in
# three minutes of processor time, evaluates its perplexity, and draws its loss.
#
#   scripts/quickstart.sh [RUN [FLAGS…]]               RUN is the folder of the run, and lm train gets the flags:
#   scripts/quickstart.sh runs/short --set train.steps=100
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
  -*) echo "quickstart: $1: name the folder of the run first: scripts/quickstart.sh runs/quickstart $*" >&2 && exit 2 ;;
esac
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
run=${1:-runs/quickstart}
shift $(($# > 0))
flags=$*

if ! command -v "$python" >/dev/null; then
  echo "quickstart: PYTHON=$python: no such program; install Python 3.11 or newer, or set PYTHON=/path/to/python3.11" >&2
  exit 2
fi
if [ ! -w . ]; then
  echo "quickstart: $PWD cannot be written, and .venv, data and runs go there; copy the checkout: cp -r $(printf %q "$PWD") ~/lm" >&2
  exit 2
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "quickstart: $("$python" --version) is too old; install Python 3.11 or newer, or set PYTHON=/path/to/python3.11" >&2
  exit 2
}
echo "== installing into .venv with $("$python" --version)"
scripts/install.sh report
lm=.venv/bin/lm
gin=(--gin_file configs/experiments/quickstart.gin)
echo "== lm prepare: the standard library of this interpreter as tokens"
"$lm" prepare "${gin[@]}"
echo "== lm train: three minutes of processor time, more than half of that by the clock on two idle cores"
"$lm" train "${gin[@]}" --run_dir "$run" "$@"
echo "== lm evaluate: perplexity of text that the model has not seen"
"$lm" evaluate --run_dir "$run"
echo "== lm report: pictures, and a page for the browser"
"$lm" report "$run" --out "$run-report"
cat <<TEXT

The prepared tokens lie in data/quickstart, the run in $run (config.gin, metrics.jsonl, checkpoints/, evaluations/).
Expect a validation perplexity per token of 20 to 23${flags:+ without your flags}; the sources differ a little between Python versions.
The loss during the training is in $run-report/loss.png, the loss by position in $run-report/position.png.
Open $run-report/report.html in a browser to read both with the pointer. These come from
  $lm report $run --out $run-report
which also compares several runs.
Next: README.md, or  $lm train --help
TEXT
