#!/usr/bin/env bash
# Students of one teacher, with 5 % of its tokens: what each attention loses, with and without stage 1, at three windows,
# and by which layer stays full (docs/results.md). The teacher is the softmax model of seed 1 of
# configs/papers/study/mechanisms/sweep.gin after 800 steps. A stage that has ended is not run again, and one that was
# stopped goes on.
#
#   configs/papers/study/distill/convert.sh TEACHER [ROOT] [NAME …]
#
# ROOT (runs/students) gets the runs, two per student: NAME_align and NAME. NAME … are the students; default: all.
#
# Hardware: 2 CPU cores, 3 to 5 minutes per student on one of them
set -euo pipefail
if [ $# -lt 1 ] || [ ! -f "$1/config.gin" ]; then
  echo "convert: ${1:-}: name the run of the teacher" >&2
  exit 2
fi
teacher=$1
root=${2:-runs/students}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/../../../.."
lm=${LM:-lm}
common=(
  --set train.tokens_per_step=1024 --set train.log_every=10 --set train.eval_every=None --set train.eval_tokens=65536
  --set "optimizer.rule=@adamw()" --set optimizer.weight_decay=0.0 --set optimizer.warmup_steps=10
)
plain=(--set model.convolution=None --set model.output_gate=False)

# run STAGE NAME STEPS RATE [flags]: one stage of one student.
run() {
  local stage=$1 name=$2 steps=$3 rate=$4
  shift 4
  [ -d "$root/$name/checkpoints/$steps" ] && return
  $lm distill --stage "$stage" --teacher "$teacher" --run_dir "$root/$name" --compile_cache "$root/compiled" \
    "${common[@]}" --set "train.steps=$steps" --set "optimizer.peak_learning_rate=$rate" "$@"
}

# both NAME [flags]: both stages of one student, 1.9 % and 3.1 % of the tokens, in steps of one window.
# alone NAME [flags]: stage 2 for the tokens of both, at the rate that it needs then.
both() {
  local name=$1
  shift
  run align "${name}_align" 120 3e-3 "$@"
  run distill "$name" 200 3e-4 --init_from "$root/${name}_align" "$@"
}
alone() {
  local name=$1
  shift
  run distill "$name" 320 1e-3 "$@"
}

# student NAME: the flags of a student.
student() {
  local attention=configs/attention
  case $1 in
    hedgehog) both "$1" --gin_file $attention/hedgehog.gin ;;
    hedgehog_alone) alone "$1" --gin_file $attention/hedgehog.gin ;;
    window_64) both "$1" --gin_file $attention/window_linear.gin ;;
    window_64_alone) alone "$1" --gin_file $attention/window_linear.gin ;;
    window_128) both "$1" --gin_file $attention/window_linear.gin --set window_linear.window=128 ;;
    polysketch) both "$1" --gin_file $attention/polysketch.gin --set polysketch.sketch_size=16 --set polysketch.block=128 ;;
    llops) both "$1" --gin_file $attention/llops.gin --set llops.n_features=128 ;;
    gated_linear) both "$1" --gin_file $attention/gated_linear.gin "${plain[@]}" ;;
    gated_delta) both "$1" --gin_file $attention/gated_delta.gin "${plain[@]}" ;;
    gated_delta_alone) alone "$1" --gin_file $attention/gated_delta.gin "${plain[@]}" ;;
    gated_delta_convolution) both "$1" --gin_file $attention/gated_delta.gin --set model.output_gate=False ;;
    hedgehog_full_*) hybrid "$1" hedgehog "${1##*_}" --gin_file $attention/hedgehog.gin ;;
    window_64_full_*) hybrid "$1" window_64 "${1##*_}" --gin_file $attention/window_linear.gin ;;
    *) echo "convert: $1: no such student" >&2 && exit 2 ;;
  esac
}

# hybrid NAME BASE LAYER [flags]: stage 2 of BASE with layer LAYER full. `recall` is the layer whose swap costs recall
# most, `ratio` the layer whose swap costs it most per loss of plain text.
hybrid() {
  local name=$1 base=$2 layer=$3
  shift 3
  student "$base"
  if [ "$layer" = recall ] || [ "$layer" = ratio ]; then
    local ranking=recall_per_loss
    [ "$layer" = ratio ] || ranking=recall
    $lm distill --choose 1 --rank_by "$ranking" --teacher "$teacher" --run_dir "$root/${base}_align"
    set -- "$@" --gin_file "$root/${base}_align/pattern.gin"
  else
    local each=(@mechanism @mechanism @mechanism @mechanism)
    each[layer]=@softmax
    local pattern="[${each[0]}(), ${each[1]}(), ${each[2]}(), ${each[3]}()]"
    local mechanism=hedgehog
    [ "$base" = hedgehog ] || mechanism=window_linear
    set -- "$@" --set "model.attention=${pattern//mechanism/$mechanism}"
  fi
  run distill "$name" 200 3e-4 --init_from "$root/${base}_align" "$@"
}

all=(
  hedgehog window_64 window_128 window_64_full_recall window_64_full_ratio polysketch llops gated_linear gated_delta
  window_64_alone hedgehog_alone gated_delta_alone gated_delta_convolution
)
[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do student "$name"; done
