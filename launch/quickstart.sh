#!/usr/bin/env bash
# Trains two models on the embedded data set, evaluates and compares them, and makes the test images
# searchable. Rerun to resume. With --open, ends with the search page in a browser.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
case ${1:-} in ''|--open) ;; *) echo "usage: $0 [--open]" >&2; exit 2 ;; esac
losses=(sampled_softmax cross_example_softmax) times=()
trap 'trap - INT TERM; kill 0' INT TERM # also stops what runs in the background

# stage NAME COMMAND…: runs it, and remembers how long it took.
stage() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  times+=("$(printf '%4d s  %s' $((SECONDS - start)) "$name")")
}

# both COMMAND…: for both losses side by side, LOSS standing for each; on two cores that is faster
# than one after the other. Progress bars, which end in \r, are left out.
both() {
  local loss running=() failed=0 XLA_FLAGS=${XLA_FLAGS:-}
  # Else glibc returns the workspace to the system after every step, and page faults cost a sixth of
  # the time. Not for the server, which is to return memory.
  local -x MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184
  if [ "$(getconf _NPROCESSORS_ONLN)" -le 2 ]; then # a thread each; more would get in each other's way
    export XLA_FLAGS="$XLA_FLAGS --xla_cpu_multi_thread_eigen=false"
    local -x OPENBLAS_NUM_THREADS=1
  fi
  for loss in "${losses[@]}"; do
    "${@//LOSS/$loss}" > >(sed -u "s/.*\r//; s/^/$loss: /") 2>&1 &
    running+=($!)
  done
  for loss in "${running[@]}"; do wait "$loss" || failed=$?; done
  return $failed
}

run=runs/quickstart
mkdir -p $run
export JAX_COMPILATION_CACHE_DIR=$PWD/$run/compiled # commands share compiled functions
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2
stage "installing" environment
stage "drawing the data set" \
  python -c 'from xe_retrieval.data import datasets; datasets.builder("shapes/20000", "datasets")'
stage "training both" \
  both python -m xe_retrieval.main --config=configs/quickstart.py:LOSS --workdir=$run/LOSS
stage "evaluating both" both python -m xe_retrieval.evaluate --workdir=$run/LOSS
stage "comparing" python -m xe_retrieval.compare "${losses[@]/#/$run/}" --out=$run/comparison
stage "indexing" python -m xe_retrieval.index --workdir=$run/cross_example_softmax \
  --images=shapes/20000:test --out=$run/index
echo "where the time went ($SECONDS s):"
printf '%s\n' "${times[@]}"
echo "search in a browser: $(command -v python) -m xe_retrieval.serve --index=$run/index"
if [ "${1:-}" = --open ]; then
  exec python -m xe_retrieval.serve --index=$run/index --open
fi
