#!/usr/bin/env bash
# Clone, quickstart, generate, tests: the first hour of a newcomer, with the commands of the README.
# slow: it installs the package twice and runs the short tests, a quarter of an hour on two idle cores
source "$(dirname "$0")/words.sh"

# As in a newcomer's shell. The clone makes its own environment, and its programs are compiled as a user's are.
unset PYTHONPATH XLA_FLAGS JAX_PLATFORMS JAX_COMPILATION_CACHE_DIR
newcomer=$(python -c 'import sys; print(sys.base_prefix)')/bin/python3
export PYTHON=$newcomer

step clone
expect git clone --quiet "$root" "the clone"
cd "the clone"

step 'the quickstart, shortened'
expect scripts/quickstart.sh runs/quickstart --set train.steps=100
shows 'validation' 'Expect a validation perplexity' '20 to 23 without your flags'
is_there runs/quickstart/evaluations runs/quickstart-report/loss.png runs/quickstart-report/report.html
expect .venv/bin/lm inspect runs/quickstart
shows 'finished, step 100 of 100'

step generate
expect .venv/bin/lm generate --run_dir runs/quickstart --prompt "def main(" --temperature 0.8 --max_tokens 32
shows 'def main('

step 'the tests'
expect scripts/test.sh
shows ' passed'
hides ' failed'
expect git status --porcelain
hides '?? ' ' M '
