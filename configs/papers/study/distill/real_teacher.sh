#!/usr/bin/env bash
# A checkpoint of others as a hybrid: every fourth layer keeps softmax, the others get a window of 64 and linear attention
# (docs/results.md has SmolLM2-135M). Steps have one window of 512 tokens, because CPUs allow few. A stage that has ended
# is not run again, and one that was stopped goes on; more steps extend it.
#
#   lm import SmolLM2-135M-Instruct.Q4_1.gguf --run_dir runs/smollm2
#   configs/papers/study/distill/real_teacher.sh runs/smollm2 TEXTS [ROOT]
#
# TEXTS holds train/*.txt, validation/*.txt and held_out/*.txt. ROOT (runs/real_teacher) gets the tokens and three runs:
# `start` is the student before stage 1, `align` and `student` are the stages. ALIGN_STEPS (100) and DISTILL_STEPS (50) are
# their steps. PATTERN is the attention of the layers, as `model.attention` takes it. The last lines are the nats of each
# held-out text, and the numbers that each model finds (needles.py).
#
# Hardware: 2 CPU cores and 8 GB, 5 to 20 s per step
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
[ -f "$root/data/dataset.json" ] || $lm prepare --gin_file data/text.gin --set "text_files.path=$texts" \
  --set "data.path=$root/data" --set "tokenizer.model_path=$teacher"

# run NAME STAGE STEPS RATE [flags]: one stage, saved every ten steps.
run() {
  local name=$1 stage=$2 steps=$3 rate=$4
  shift 4
  [ -d "$root/$name/checkpoints/$steps" ] && return
  $lm distill --stage "$stage" --teacher "$teacher" --run_dir "$root/$name" --compile_cache "$root/compiled" \
    --gin_file configs/attention/window_linear.gin \
    --set "model.attention=${PATTERN:-[@window_linear(), @window_linear(), @window_linear(), @softmax()]}" \
    --set "data.path=$root/data" --set train.context_length=512 --set train.tokens_per_step=512 \
    --set "train.steps=$steps" --set train.log_every=1 --set train.eval_every=None --set train.eval_tokens=8192 \
    --set checkpoint.save_every_steps=10 --set checkpoint.keep_last=1 \
    --set "optimizer.rule=@adamw()" --set optimizer.weight_decay=0.0 --set optimizer.warmup_steps=5 \
    --set "optimizer.schedule=@constant()" --set "optimizer.peak_learning_rate=$rate" "$@"
}

run start align 1 1e-12 --set optimizer.warmup_steps=0
run align align "${ALIGN_STEPS:-100}" 1e-3
run student distill "${DISTILL_STEPS:-50}" 1e-4 --init_from "$root/align"
models=("$teacher" "$root/start" "$root/align" "$root/student")
python=${PYTHON:-python3}
$python configs/papers/study/distill/held_out.py "${models[@]}" --texts "$texts/held_out"
$python configs/papers/study/distill/needles.py "${models[@]}" --samples 3
