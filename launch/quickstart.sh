#!/usr/bin/env bash
# Trains two models on the embedded data set, evaluates and compares them, and makes the test images
# searchable. Rerun to resume.
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
echo "== index"
python -m xe_retrieval.index --workdir=runs/quickstart/cross_example_softmax \
  --images=shapes/20000:test --out=runs/quickstart/index
echo "search in a browser: $(command -v python) -m xe_retrieval.serve --index=runs/quickstart/index"
