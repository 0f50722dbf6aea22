#!/usr/bin/env bash
# README's first block, copied into a plain shell in a clone whose path has spaces; the training is shortened.
# slow: it installs the package, trains for 100 steps and measures attention
source "$(dirname "$0")/words.sh"

# As in a newcomer's shell: no `lm` is on the path before the block activates the environment.
newcomer=$(python -c 'import sys; print(sys.base_prefix)')/bin/python3
unset PYTHONPATH XLA_FLAGS JAX_PLATFORMS JAX_COMPILATION_CACHE_DIR
PATH=${PATH#"$JOURNEY/commands:"}
export PYTHON=$newcomer

step clone
expect git clone --quiet "$root" lm
cd lm

step 'the first block of README'
awk '/^```bash$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' README.md >"$JOURNEY/block"
equal "$(head -n 1 "$JOURNEY/block")" scripts/quickstart.sh
sed -i.bak '1s#$# runs/quickstart --set train.steps=100#' "$JOURNEY/block"
expect bash -e "$JOURNEY/block"
shows 'Expect a validation perplexity' 'softmax: ' 'The picture: demo/demo.png' 'def main('
is_there demo/demo.json demo/demo.pdf runs/quickstart/tokenizer.model

step 'beside the clone'
cd ..
expect lm/.venv/bin/python -c 'import lm; print(lm.load)'
shows 'function open_run'
expect lm/.venv/bin/python -m lm --version
shows 'lm '
