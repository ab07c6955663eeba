#!/usr/bin/env bash
# Embeds a collection as a SLURM array, one part per task: sbatch launch/embed_slurm.sh
# Two minutes before the time limit, and at a preemption, SLURM sends SIGTERM: the task is requeued
# and goes on from there. What is missing in the end: python -m xe_retrieval.embed --out=…; start
# these again by sbatch --array=3,17-19 launch/embed_slurm.sh
#
# ---- edit: how much of the cluster; --array has as many tasks as there are PARTS ----
#SBATCH --job-name=xe_retrieval_embed
#SBATCH --array=1-64
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%A-%a.log
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

# ---- edit: which pictures, and where vectors go (directories that all nodes see) ----
PARTS=${PARTS:-64} # stays the same when only some tasks are started again
SHARED=${SHARED:-$HOME/xe_retrieval}
IMAGES=${IMAGES:-$SHARED/photos}

source "${VIRTUAL_ENV:-$PWD/.venv}/bin/activate" # pip install -c constraints.txt -e '.[cuda]'
code=0
# srun does not take --cpus-per-task from sbatch.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -m xe_retrieval.embed --workdir="$SHARED/runs/cc" \
  --images="$IMAGES" --out="$SHARED/vectors" --part="$SLURM_ARRAY_TASK_ID/$PARTS" || code=$?
if [ $code = 143 ]; then # stopped by SIGTERM
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  echo "stopped; requeueing $job"
  scontrol requeue "$job"
fi
exit $code
