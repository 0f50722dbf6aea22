#!/usr/bin/env bash
# A checkpoint of others as a hybrid: the layers that recall needs most keep softmax, the others get a window and linear
# attention (docs/results.md has SmolLM2-135M). Steps have one window of text, because CPUs allow few. A stage that has
# ended is not run again, and one that was stopped goes on; more steps extend it.
#
#   lm import SmolLM2-135M-Instruct.Q4_1.gguf --run_dir runs/smollm2
#   configs/papers/study/distill/real_teacher.sh runs/smollm2 TEXTS [ROOT]
#
# TEXTS holds train/*.txt, validation/*.txt and held_out/*.txt. ROOT (runs/real_teacher) gets the tokens and the runs:
# `align` is stage 1 of all layers, `chosen` the student before stage 2, and `student` is stage 2, on texts whose passages
# stand twice (copy_texts.py). The last lines are the nats of each held-out text, and the numbers that each model finds
# (needles.py). Settings, by their names in the environment:
#
#   FULL (8)            layers that keep softmax, the first ones by recall (lm distill --choose)
#   PATTERN             in place of FULL: the attention of the layers, as `model.attention` takes it
#   WINDOW (256)        newest keys that softmax weighs in the other layers
#   LENGTH (1024)       tokens of a window of text
#   CHOICE_TOKENS (LENGTH), ALIGN_STEPS (100), DISTILL_STEPS (20), SAMPLES (10) needles, SEED (0) of training and needles
#
# Hardware: 2 CPU cores and 12 GB, 10 to 60 s per step
set -euo pipefail
if [ $# -lt 2 ] || [ ! -f "$1/config.gin" ] || [ ! -d "$2/held_out" ]; then
  echo "real_teacher: ${1:-} ${2:-}: name the run of the teacher, and a folder with train/, validation/ and held_out/" >&2
  exit 2
fi
teacher=$(cd "$1" && pwd)
texts=$(cd "$2" && pwd)
cd "$(dirname "$0")/../../../.."
root=${3:-runs/real_teacher}
lm=${LM:-lm}
python=${PYTHON:-python3}
[ -d "$root/copies" ] || $python configs/papers/study/distill/copy_texts.py "$texts" "$root/copies"

# prepare TEXTS TOKENS: a token store.
prepare() {
  [ -f "$2/dataset.json" ] || $lm prepare --gin_file data/text.gin --set "text_files.path=$1" --set "data.path=$2" \
    --set "tokenizer.model_path=$teacher"
}

prepare "$texts" "$root/data"
prepare "$root/copies" "$root/data_copies"

# run NAME STAGE STEPS RATE [flags]: one stage, saved every ten steps.
run() {
  local name=$1 stage=$2 steps=$3 rate=$4
  shift 4
  [ -d "$root/$name/checkpoints/$steps" ] && return
  $lm distill --stage "$stage" --teacher "$teacher" --run_dir "$root/$name" --compile_cache "$root/compiled" \
    --gin_file configs/attention/window_linear.gin --set "window_linear.window=${WINDOW:-256}" \
    --set "data.path=$root/data" --set "train.context_length=${LENGTH:-1024}" \
    --set "train.tokens_per_step=${LENGTH:-1024}" --set "train.seed=${SEED:-0}" \
    --set "train.steps=$steps" --set train.log_every=1 --set train.eval_every=None --set train.eval_tokens=8192 \
    --set checkpoint.save_every_steps=10 --set checkpoint.keep_every=10 \
    --set "optimizer.rule=@adamw()" --set optimizer.weight_decay=0.0 --set optimizer.warmup_steps=5 \
    --set "optimizer.schedule=@constant()" --set "optimizer.peak_learning_rate=$rate" "$@"
}

run align align "${ALIGN_STEPS:-100}" 1e-3
if [ -n "${PATTERN:-}" ]; then
  pattern=(--set "model.attention=$PATTERN")
else
  [ -f "$root/align/pattern.gin" ] || $lm distill --choose "${FULL:-8}" --rank_by recall --teacher "$teacher" \
    --run_dir "$root/align" --set "train.eval_tokens=${CHOICE_TOKENS:-${LENGTH:-1024}}"
  pattern=(--gin_file "$root/align/pattern.gin")
fi
run chosen distill 1 1e-12 --init_from "$root/align" --set optimizer.warmup_steps=0 "${pattern[@]}"
run student distill "${DISTILL_STEPS:-20}" 1e-4 --init_from "$root/align" --set "data.path=$root/data_copies" \
  "${pattern[@]}"
models=("$teacher" "$root/chosen" "$root/student")
$python configs/papers/study/distill/held_out.py "${models[@]}" --texts "$texts/held_out"
$python configs/papers/study/distill/needles.py "${models[@]}" --samples "${SAMPLES:-10}" --lengths 1024,2048 \
  --seed "${SEED:-0}"
