#!/usr/bin/env bash
# Validation perplexity of every attention mechanism on the same text, three seeds each: prepares the text, runs
# configs/papers/study/real_text/sweep.gin (36 runs), and writes the table. Run it again to continue where it stopped.
#
#   configs/papers/study/real_text/real_text_table.sh FOLDER [ROOT] [further flags of lm sweep, such as --jobs 2]
#
# FOLDER holds train/*.txt, validation/*.txt and test/*.txt, as PG-19 does. ROOT (runs/real_text) gets the runs.
set -euo pipefail
if [ $# -lt 1 ] || [ ! -d "$1" ]; then
  echo "real_text_table: ${1:-}: name a folder with train/*.txt and validation/*.txt" >&2
  exit 2
fi
folder=$(cd "$1" && pwd)
root=${2:-runs/real_text}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/../../../.."
lm=${LM:-lm}
gin=(--gin_file configs/papers/study/real_text/real_text.gin --gin_param "text_files.path = '$folder'")
[ -f data/real_text/dataset.json ] || $lm prepare "${gin[@]}"
$lm sweep --run_dir "$root" "${gin[@]}" --sweep_file configs/papers/study/real_text/sweep.gin "$@"
$lm report "$root" --out "$root/report"
"${PYTHON:-python3}" configs/papers/results_table.py "$root" | tee "$root/table.md"
