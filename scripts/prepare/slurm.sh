#!/usr/bin/env bash
# Prepares a token store as a job array of Slurm: one share per task. The store lies on a disk that all nodes see.
#
#   sbatch --array=0-15 scripts/prepare/slurm.sh --gin_file data/c4.gin --set data.path=/shared/tokens/c4
#
# A node that is preempted or lost starts its share again, and nothing else is repeated. To make only the shares 3 and 7
# again: SHARES=16 sbatch --array=3,7 …
#SBATCH --job-name=lm-prepare
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
shares=${SHARES:-$((SLURM_ARRAY_TASK_MAX + 1))}
command=(lm prepare "$@" --processes "${SLURM_CPUS_PER_TASK:-1}" --shard "$SLURM_ARRAY_TASK_ID/$shares")
"${command[@]}"
code=$?
if [ "$code" = 42 ]; then scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; fi
exit "$code"
