#!/usr/bin/env bash
# One process per GPU on a SLURM cluster: sbatch launch/slurm.sh
# Two minutes before the time limit, and at a preemption, SLURM sends SIGTERM to the processes: they
# save their state and exit with 75, the job is requeued, and it resumes. `scancel` ends it for good.
#
# ---- edit: how much of the cluster ----
#SBATCH --job-name=xe_retrieval
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

# ---- edit: what to train, and where (a directory that all nodes see) ----
SHARED=${SHARED:-$HOME/xe_retrieval}
TRAIN=${TRAIN:-"--config=configs/cc_large.py:cross_example_negative_mining,4096"}

source "${VIRTUAL_ENV:-$PWD/.venv}/bin/activate" # pip install -c constraints.txt -e '.[cuda]'
code=0
# srun does not take --cpus-per-task from sbatch.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -m xe_retrieval.main --distributed $TRAIN \
  --workdir="$SHARED/runs/cc" --config.data.dir="$SHARED/datasets" || code=$?
if [ $code = 75 ]; then # stopped before the last step
  echo "stopped; requeueing job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
