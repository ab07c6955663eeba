#!/usr/bin/env bash
# Trains on every host of a TPU pod slice. Needs gcloud, logged in, and data prepared in the bucket.
# The job goes on without this connection; run again to start it again after a preemption: it resumes.
#   LOG=1 launch/tpu_pod.sh          # the last lines of host 0
set -euo pipefail
cd "$(dirname "$0")/.."

# ---- edit these three ----
POD="${POD:-xe-pod} --zone=${ZONE:-us-central2-b}"             # an existing slice; see below
BUCKET=${BUCKET:-gs://my-bucket/xe_retrieval}                   # holds datasets/ and runs/
TRAIN=${TRAIN:-"--config=configs/cc_large.py:cross_example_negative_mining,32768"}
# A slice is made once by
#   gcloud compute tpus tpu-vm create $POD --accelerator-type=v4-32 --version=tpu-ubuntu2204-base

on() { gcloud compute tpus tpu-vm ssh $POD --worker="$1" --command="$2"; }
if [ -n "${LOG:-}" ]; then
  on 0 "tail -n 40 xe_retrieval/train.log"
  exit
fi

archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" ${POD%% *}:xe_retrieval.tar.gz ${POD#* } --worker=all
# Ubuntu 22.04 has Python 3.10: uv brings 3.11. Shards are read from the disk, so each host copies them.
on all "mkdir -p xe_retrieval && tar -xzf xe_retrieval.tar.gz -C xe_retrieval && cd xe_retrieval &&
  { [ -x .venv/bin/python ] ||
    { python3 -m pip install --quiet --user uv && python3 -m uv venv --python=3.11 --seed .venv; }; } &&
  .venv/bin/pip install --quiet -c constraints.txt -e '.[tpu,gcs]' &&
  mkdir -p datasets && gcloud storage rsync --recursive $BUCKET/datasets datasets"
# setsid and nohup: it survives the end of the connection. flock: a second start does nothing.
on all "cd xe_retrieval && . .venv/bin/activate && nohup setsid flock --nonblock train.lock \
  python -m xe_retrieval.main --distributed $TRAIN \
  --workdir=$BUCKET/runs/cc --config.data.dir=datasets >> train.log 2>&1 < /dev/null &"
echo "started; LOG=1 $0 shows the last lines"
