#!/usr/bin/env bash
# Accuracy of attention mechanisms on associative recall, as LLoPS Tables 4 and 5 compare them, in a form for a CPU: six
# mechanisms, 4 pairs first and then 16 from those weights; about an hour of one core in all. Run it again to continue
# where it stopped.
#
#   configs/papers/llops/tables_4_5_recall/recall_table.sh [further flags of lm sweep, such as --jobs 2]
#
# The runs lie in runs/recall_small, the table in runs/recall_small/table.md.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
lm=${LM:-lm}
root=runs/recall_small
here=configs/papers/llops/tables_4_5_recall
for stage in start finish; do
  $lm sweep --run_dir "$root/$stage" --gin_file "$here/associative_recall_$stage.gin" \
    --sweep_file "$here/sweep_associative_recall_$stage.gin" "$@"
done
$lm report "$root/finish" --out "$root/report"
"${PYTHON:-python3}" configs/papers/results_table.py "$root/finish" | tee "$root/table.md"
