#!/usr/bin/env bash
# The words of the journeys. A journey is one script beside this file: a whole act of a user, with what must be true after
# each command. It begins with `source "$(dirname "$0")/words.sh"`, and then stands in an empty folder, where `lm` and
# `python` are the commands. A script with a line `# slow: WHY` runs with the slow tests only.
#
#   scripts/test.sh -m journey             all journeys
#   bash tests/journeys/NAME.sh            one of them; PYTHON names the interpreter, by default .venv/bin/python
#
#   step TEXT                       names what follows; a failure prints it
#   expect COMMAND…                 the command ends with 0
#   refuse CODE COMMAND…            the command ends with CODE and one line on stderr
#   begin COMMAND…                  starts the command in the background, as a terminal would
#   until_step RUN STEP             waits until the run has logged the step
#   until_there PATH                waits until that command has written the file
#   stop SIGNAL                     sends the signal to that command and waits for its end: `code`, and its output
#   interrupt SIGNAL RUN STEP COMMAND…   all three
#   shows TEXT…                     the output of the last command contains each text
#   hides TEXT…                     … and none of these
#   is_there PATH…, is_gone PATH…   the files or folders exist, or do not
#   equal A B                       both texts are the same, and not empty
#   figure NAME                     prints a field of the JSON that the last command printed: perplexity, checkpoints.0.step
#   records RUN                     prints kind, step and loss of each line of metrics.jsonl
#   run_remedy                      runs the `lm …` command that the last error names in `backquotes`
#   write_text FOLDER               writes a small corpus
#   write_experiment FILE TEXT STORE   writes the gin file of a tiny model on that corpus
set -Eeuo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-$root/.venv/bin/python}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} PYTHONPATH=$root PYTHON
export XLA_FLAGS=${XLA_FLAGS:---xla_backend_optimization_level=0}
made=
if [ -z "${JOURNEY:-}" ]; then JOURNEY=$(mktemp -d) && made=$JOURNEY; fi
end() {
  jobs -p | xargs -r kill 2>/dev/null || true
  if [ -n "$made" ]; then rm -rf "$made"; fi
}
trap end EXIT
trap 'exit 143' TERM
mkdir -p "$JOURNEY/commands" "$JOURNEY/a user's folder"
for command in 'lm -m lm.cli' 'python'; do
  read -r name arguments <<<"$command"
  # The program takes the place of the shell, so that a signal reaches it.
  # shellcheck disable=SC2016  # the shell of the command expands them
  printf '#!/usr/bin/env bash\nexec "$PYTHON" %s "$@"\n' "$arguments" >"$JOURNEY/commands/$name"
  chmod +x "$JOURNEY/commands/$name"
done
PATH=$JOURNEY/commands:$PATH
cd "$JOURNEY/a user's folder"
place='the beginning' code=0
printed=$JOURNEY/stdout complained=$JOURNEY/stderr
touch "$printed" "$complained"

step() {
  place=$*
  echo "== $*"
}

# fail MESSAGE: ends the journey, with the step and the output of the last command.
fail() {
  trap - ERR
  {
    echo "the journey failed at: $place"
    echo "$1"
    if [ -s "$printed" ]; then sed 's/^/  | /' "$printed"; fi
    if [ -s "$complained" ]; then sed 's/^/  ! /' "$complained"; fi
  } >&2
  exit 1
}
trap 'fail "this command failed: $BASH_COMMAND"' ERR

# run COMMAND…: sets `code`; the output is kept.
run() {
  code=0
  echo "\$ $*"
  "$@" >"$printed" 2>"$complained" </dev/null || code=$?
}

expect() {
  run "$@"
  [ "$code" = 0 ] || fail "exit code $code, and 0 was expected: $*"
}

refuse() {
  local wanted=$1
  shift
  run "$@"
  [ "$code" = "$wanted" ] || fail "exit code $code, and $wanted was expected: $*"
  [ "$(wc -l <"$complained")" = 1 ] || fail "one line on stderr was expected: $*"
}

begin() {
  echo "\$ $* &"
  begun=$*
  : >"$JOURNEY/begun.stdout" 2>"$JOURNEY/begun.stderr" # a signal may come before the job opens them
  set -m # else the shell would make its background jobs ignore Ctrl-C
  "$@" >"$JOURNEY/begun.stdout" 2>"$JOURNEY/begun.stderr" </dev/null &
  background=$!
  set +m
}

until_step() {
  until grep -qs "\"step\": $2," "$1/metrics.jsonl"; do
    kill -0 "$background" 2>/dev/null || { take_output && fail "it ended before step $2: $begun"; }
    sleep 0.05
  done
}

until_there() {
  until [ -e "$1" ]; do
    kill -0 "$background" 2>/dev/null || { take_output && fail "it ended before it wrote $1: $begun"; }
    sleep 0.05
  done
}

stop() {
  local still=yes
  code=0
  kill -s "$1" "$background" 2>/dev/null || still=
  { wait "$background" || code=$?; } 2>/dev/null # the shell would report a kill
  take_output
  [ -n "$still" ] || fail "it ended before the signal: $begun"
}

take_output() {
  cat "$JOURNEY/begun.stdout" >"$printed"
  cat "$JOURNEY/begun.stderr" >"$complained"
}

interrupt() {
  begin "${@:4}"
  until_step "$2" "$3"
  stop "$1"
}

shows() {
  local text
  for text in "$@"; do
    cat "$printed" "$complained" | tr '\n' ' ' | grep -qF -- "$text" || fail "the output must contain: $text"
  done
}

hides() {
  local text
  for text in "$@"; do
    if cat "$printed" "$complained" | grep -qF -- "$text"; then fail "the output must not contain: $text"; fi
  done
}

is_there() {
  local path
  for path in "$@"; do [ -e "$path" ] || fail "must be there: $path"; done
}

is_gone() {
  local path
  for path in "$@"; do [ ! -e "$path" ] || fail "must not be there: $path"; done
}

equal() {
  [ -n "$1" ] || fail "a text to compare is empty"
  [ "$1" = "$2" ] || fail "must be equal: '$1' and '$2'"
}

figure() {
  python - "$printed" "$1" <<'PYTHON'
import json, sys

value = json.load(open(sys.argv[1]))
for name in sys.argv[2].split('.'):
    value = value[int(name) if isinstance(value, list) else name]
print(value if isinstance(value, str) else json.dumps(value))
PYTHON
}

records() {
  python - "$1/metrics.jsonl" <<'PYTHON'
import json, sys

for line in open(sys.argv[1]):
    record = json.loads(line)
    print(record['kind'], record['step'], record['loss'])
PYTHON
}

run_remedy() {
  local command
  # shellcheck disable=SC2016  # these are backquotes of a text
  command=$(sed -n 's/.*`\(lm [^`]*\)`.*/\1/p' "$complained")
  [ -n "$command" ] || fail 'the error names no command in backquotes'
  eval "expect $command"
}

write_text() {
  python - "$1" <<'PYTHON'
import os, pathlib, sys

library = pathlib.Path(os.__file__).parent
for split, module, characters in (('train', 'argparse', 60_000), ('validation', 'shlex', 6000), ('test', 'bisect', 6000)):
    folder = pathlib.Path(sys.argv[1], split)
    folder.mkdir(parents=True, exist_ok=True)
    text = (library / f'{module}.py').read_text(encoding='utf-8')
    (folder / f'{module}.txt').write_text(text[:characters], encoding='utf-8')
PYTHON
}

write_experiment() {
  cat >"$1" <<GIN
prepare.source = @text_files()
text_files.path = '$2'
prepare.tokenizer = @tokenizer()
tokenizer.vocab_size = 400
data.path = '$3'
model.vocab_size = 400
model.n_layers = 2
model.d_model = 32
model.n_heads = 2
model.head_dim = 16
train.steps = 40
train.tokens_per_step = 256
train.context_length = 32
train.log_every = 1
train.eval_every = 20
evaluate.batch_size = 16
optimizer.warmup_steps = 5
optimizer.peak_learning_rate = 3e-3
checkpoint.save_every_steps = 10
GIN
}
