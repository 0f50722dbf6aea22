#!/usr/bin/env bash
# Students of one teacher, with 5 % of its tokens: what each attention loses, with and without stage 1, at three windows,
# by which layer stays full, and by what learns (docs/results.md). The teacher is the softmax model of seed 1 of
# configs/papers/study/mechanisms/sweep.gin after 800 steps. A stage that has ended is not run again, and one that was
# stopped goes on.
#
#   configs/papers/study/distill/convert.sh TEACHER [ROOT] [NAME …]
#
# ROOT (runs/students) gets the runs, two per student: NAME_align and NAME. NAME … are the students; default: all. A name
# is an attention of find_flags, and may end in
#
#   _alone           stage 2 alone, for the tokens of both
#   _new             stage 1 trains only what the teacher lacks
#   _frozen          stage 2 keeps the feed-forward layers as they are
#   _full_0 to _3    the layer keeps the teacher's attention
#   _full_recall     the same for the layer whose swap costs recall most
#   _full_ratio      the same for the layer whose swap costs recall most per loss of plain text
#
# ALIGN_STEPS, DISTILL_STEPS and DISTILL_RATE are the steps of both stages, of one window each, and the rate of stage 2.
# Their defaults are 5 % of the tokens of this teacher. EVAL_TOKENS is the number of tokens that both models are
# compared on.
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
align_steps=${ALIGN_STEPS:-120}
distill_steps=${DISTILL_STEPS:-200}
distill_rate=${DISTILL_RATE:-3e-4}
common=(
  --set train.tokens_per_step=1024 --set train.log_every=10 --set train.eval_every=None
  --set "train.eval_tokens=${EVAL_TOKENS:-65536}"
  --set "optimizer.rule=@adamw()" --set optimizer.weight_decay=0.0 --set optimizer.warmup_steps=10
)

# run STAGE NAME STEPS RATE [flags]: one stage of one student.
run() {
  local stage=$1 name=$2 steps=$3 rate=$4
  shift 4
  [ -d "$root/$name/checkpoints/$steps" ] && return
  $lm distill --stage "$stage" --teacher "$teacher" --run_dir "$root/$name" --compile_cache "$root/compiled" \
    "${common[@]}" --set "train.steps=$steps" --set "optimizer.peak_learning_rate=$rate" "$@"
}

# align NAME [flags]: stage 1.
# distill NAME BASE [flags]: stage 2 after stage 1 of BASE.
align() {
  local name=$1
  shift
  run align "${name}_align" "$align_steps" 3e-3 "$@"
}
distill() {
  local name=$1 base=$2
  shift 2
  run distill "$name" "$distill_steps" "$distill_rate" --init_from "$root/${base}_align" "$@"
}

# find_flags ATTENTION: the flags of a student whose layers are all alike. Gated students have no output gate, and no
# convolution but for one.
find_flags() {
  local folder=configs/attention
  case $1 in
    hedgehog) flags=(--gin_file "$folder/hedgehog.gin") ;;
    window_64) flags=(--gin_file "$folder/window_linear.gin") ;;
    window_128) flags=(--gin_file "$folder/window_linear.gin" --set window_linear.window=128) ;;
    polysketch) flags=(--gin_file "$folder/polysketch.gin" --set polysketch.sketch_size=16 --set polysketch.block=128) ;;
    llops) flags=(--gin_file "$folder/llops.gin" --set llops.n_features=128) ;;
    gated_linear | gated_delta)
      flags=(--gin_file "$folder/$1.gin" --set model.convolution=None --set model.output_gate=False)
      ;;
    gated_delta_convolution) flags=(--gin_file "$folder/gated_delta.gin" --set model.output_gate=False) ;;
    *) echo "convert: $1: no such student" >&2 && exit 2 ;;
  esac
}

# find_layer BASE LAYER: the flags of a student of one full layer.
find_layer() {
  local base=$1 layer=$2
  if [ "$layer" = recall ] || [ "$layer" = ratio ]; then
    local ranking=recall_per_loss
    [ "$layer" = ratio ] || ranking=recall
    $lm distill --choose 1 --rank_by "$ranking" --teacher "$teacher" --run_dir "$root/${base}_align"
    flags+=(--gin_file "$root/${base}_align/pattern.gin")
  else
    local mechanism=hedgehog
    [ "$base" = hedgehog ] || mechanism=window_linear
    local each=("@$mechanism()" "@$mechanism()" "@$mechanism()" "@$mechanism()")
    each[layer]='@softmax()'
    flags+=(--set "model.attention=[${each[0]}, ${each[1]}, ${each[2]}, ${each[3]}]")
  fi
}

# student NAME: all stages of one student.
student() {
  local name=$1 base=$1 flags=()
  base=${base%_full_*}; base=${base%_alone}; base=${base%_new}; base=${base%_frozen}
  find_flags "$base"
  case $name in
    *_alone)
      run distill "$name" $((align_steps + distill_steps)) 1e-3 "${flags[@]}"
      return
      ;;
    *_new)
      align "$name" "${flags[@]}" --set "align.trains='new'"
      base=$name
      ;;
    *) align "$base" "${flags[@]}" ;;
  esac
  case $name in
    *_frozen) flags+=(--set "optimizer.frozen=['glu']") ;;
    *_full_*) find_layer "$base" "${name##*_}" ;;
  esac
  distill "$name" "$base" "${flags[@]}"
}

all=(
  hedgehog window_64 window_128 window_64_full_recall window_64_full_ratio polysketch llops gated_linear gated_delta
  window_64_alone hedgehog_alone gated_delta_alone gated_delta_convolution window_64_new hedgehog_new window_64_frozen
  gated_delta_frozen
)
[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do student "$name"; done
