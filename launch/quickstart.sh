#!/usr/bin/env bash
# Trains two models on the embedded data set, evaluates both and compares them. Rerun to resume.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment

for loss in sampled_softmax cross_example_softmax; do
  echo "== $loss"
  python -m xe_retrieval.main --config=configs/quickstart.py:$loss --workdir=runs/quickstart/$loss
  python -m xe_retrieval.evaluate --workdir=runs/quickstart/$loss
done
echo "== comparison"
python -m xe_retrieval.compare runs/quickstart/{sampled_softmax,cross_example_softmax} \
  --out=runs/quickstart/comparison
