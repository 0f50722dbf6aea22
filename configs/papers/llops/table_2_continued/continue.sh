#!/usr/bin/env bash
# BASED and LLoPS of degrees 2 and 4, continued from one BASED model for the same steps, with two seeds each (the method of
# LLoPS's Table 2, docs/results.md). A run that has ended is not run again, and one that was stopped goes on.
#
#   configs/papers/llops/table_2_continued/continue.sh BASED [ROOT] [flags of lm train …]
#
# ROOT (runs/continued) gets the runs.
#
# Hardware: 2 CPU cores, 8 minutes per run on one of them (others worked on them, too)
set -euo pipefail
if [ $# -lt 1 ] || [ ! -f "$1/config.gin" ]; then
  echo "continue: ${1:-}: name the run of BASED" >&2
  exit 2
fi
based=$1
root=${2:-runs/continued}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/../../../.."
lm=${LM:-lm}
python=${PYTHON:-python}
here=configs/papers/llops/table_2_continued

# go_on NAME SEED START GIN_FILE [flags]: one run. BASED continues by the settings of LLoPS.
go_on() {
  local name=$1 seed=$2 start=$3 file=$4
  shift 4
  [ -f "$root/$name/checkpoints/60/commit_success.txt" ] && return
  $lm train --run_dir "$root/$name" --compile_cache "$root/compiled" --gin_file "$here/$file" "$@" \
    --set "train.init_from='$start'" --set "train.seed=$seed"
}
settings=(
  --set train.steps=60 --set train.eval_every=60 --set optimizer.peak_learning_rate=2e-3 --set optimizer.warmup_steps=6
)

for degree in 2 4; do
  start=$root/start_$degree
  [ -f "$start/checkpoints/0/commit_success.txt" ] ||
    $python $here/take_based.py "$based" --run_dir "$start" --gin_file $here/llops_small.gin "$@" \
      --set "llops.degree=$degree"
done
for seed in 1 2; do
  go_on "based_$seed" "$seed" "$based" based_small.gin "${settings[@]}" "$@"
  for degree in 2 4; do
    go_on "llops_${degree}_$seed" "$seed" "$root/start_$degree" llops_small.gin "$@" --set "llops.degree=$degree"
  done
done
