#!/usr/bin/env bash
# Trains on every host of a TPU pod slice. Needs gcloud, logged in, and data prepared in the bucket.
# Rerun after a preemption (or with --restart-on-maintenance tooling): training resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

# ---- edit these three ----
POD="${POD:-xe-pod} --zone=${ZONE:-us-central2-b}"             # an existing slice; see below
BUCKET=${BUCKET:-gs://my-bucket/xe_retrieval}                   # holds datasets/ and runs/
TRAIN=${TRAIN:-"--config=configs/cc.py:cross_example_negative_mining --config.batch_size=32768 --config.loss_implementation=streaming --config.dtype=bfloat16"}
# A slice is made once by
#   gcloud compute tpus tpu-vm create $POD --accelerator-type=v4-32 --version=tpu-ubuntu2204-base

everywhere() { gcloud compute tpus tpu-vm ssh $POD --worker=all --command="$1"; }

archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" ${POD%% *}:xe_retrieval.tar.gz ${POD#* } --worker=all
everywhere "mkdir -p xe_retrieval && tar -xzf xe_retrieval.tar.gz -C xe_retrieval && cd xe_retrieval &&
  { [ -x .venv/bin/python ] || python3 -m venv .venv; } &&
  .venv/bin/pip install --quiet -c constraints.txt -e '.[tpu]'"
everywhere "cd xe_retrieval && . .venv/bin/activate && exec python -m xe_retrieval.main --distributed $TRAIN \
  --workdir=$BUCKET/runs/cc --config.data.dir=$BUCKET/datasets"
