#!/usr/bin/env bash
# Trains two models on the embedded data set, evaluates and compares them, and makes the test images
# searchable. Rerun to resume. With --open, ends with the search page in a browser.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
case ${1:-} in ''|--open) ;; *) echo "usage: $0 [--open]" >&2; exit 2 ;; esac
times=()
# stage NAME COMMAND…: runs it, and remembers how long it took.
stage() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  times+=("$(printf '%4d s  %s' $((SECONDS - start)) "$name")")
}

stage "installing" environment
for loss in sampled_softmax cross_example_softmax; do
  stage "training with $loss" \
    python -m xe_retrieval.main --config=configs/quickstart.py:$loss --workdir=runs/quickstart/$loss
  stage "evaluating it" python -m xe_retrieval.evaluate --workdir=runs/quickstart/$loss
done
stage "comparing" python -m xe_retrieval.compare \
  runs/quickstart/{sampled_softmax,cross_example_softmax} --out=runs/quickstart/comparison
stage "indexing" python -m xe_retrieval.index --workdir=runs/quickstart/cross_example_softmax \
  --images=shapes/20000:test --out=runs/quickstart/index
echo "where the time went ($SECONDS s):"
printf '%s\n' "${times[@]}"
echo "search in a browser: $(command -v python) -m xe_retrieval.serve --index=runs/quickstart/index"
if [ "${1:-}" = --open ]; then
  exec python -m xe_retrieval.serve --index=runs/quickstart/index --open
fi
