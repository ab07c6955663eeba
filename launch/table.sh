#!/usr/bin/env bash
# The paper's table: every loss × five seeds, trained, evaluated and compared. Rerun to resume.
#
#   launch/table.sh                  # Flickr8k on two CPU cores: configs/flickr8k.py
#   launch/table.sh configs/cc.py --config.data.dir=datasets      # Conceptual Captions, accelerators
#
# Arguments after the config go to the training. From the environment:
#   LOSSES       default: all that xe_retrieval.losses knows      SEEDS   default: 0 1 2 3 4
#   OUT          default: runs/<config>; pages of each split are under it
#   JOBS         runs side by side; default: 2 on a machine without accelerators, else 1
#   DISTRACTORS  DATASET:SPLIT …, whose images are added to the search
#   FLICKR8K     flickr8k.tar (captions.tsv and images/), if not prepared yet
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment

config=${1:-configs/flickr8k.py}
[ $# = 0 ] || shift
[ -f "$config" ] || { echo "error: $config does not exist; configs are in configs/" >&2; exit 1; }
name=$(basename "$config" .py)
out=${OUT:-runs/$name}
read -ra seeds <<< "${SEEDS:-0 1 2 3 4}"
read -ra losses <<< "${LOSSES:-$(python -c 'from xe_retrieval import losses; print(*losses.names())')}"
mkdir -p "$out"
# Runs share compiled functions.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(cd "$out" && pwd)/compiled}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2

# Splits: settings and thresholds are chosen on validation; test is only reported.
case $name in
  flickr8k*)
    prepared=datasets/captions/flickr8k
    if [ ! -d $prepared ]; then
      tar=${FLICKR8K:-../shared/data/flickr8k.tar}
      [ -f "$tar" ] || {
        echo "error: neither $prepared nor $tar exists; FLICKR8K=… names the tar, or prepare your" \
          "own copy with a train, a validation and a test split (python -m xe_retrieval.prepare" \
          "--flickr30k=dataset_flickr8k.json --images=… --name=flickr8k)" >&2
        exit 1
      }
      # It has no test split: every sixth photo of train goes there.
      mkdir -p datasets
      tar -xOf "$tar" captions.tsv | awk -F'\t' -v OFS='\t' '
        $1 == "train" { if (!($2 in n)) n[$2] = count++; if (n[$2] % 6 == 5) $1 = "test" }
        { print }' > datasets/flickr8k.tsv
      python -m xe_retrieval.prepare --captions=datasets/flickr8k.tsv --images="$tar" --name=flickr8k
    fi
    extra=$(grep -q '"extra"' $prepared/1.0.0/manifest.json && echo captions/flickr8k:extra || true)
    distractors=${DISTRACTORS-captions/flickr8k:train $extra}
    ;;
  *) distractors=${DISTRACTORS-$(python -c "from configs import $name as c; print(c.get_config().data.name)"):train} ;;
esac
read -ra distractors <<< "$distractors"
distractors=("${distractors[@]/#/--distractors=}")

arguments=(--config="$config" --out="$out" --seeds="$(IFS=,; echo "${seeds[*]}")")
arguments+=(--losses="$(IFS=,; echo "${losses[*]}")" "${distractors[@]}" "$@")

# Several processes share the runs. The others wait for the first run, which fills the caches of
# features and compiled functions.
jobs=${JOBS:-$(python -c 'import jax; print(2 if jax.default_backend() == "cpu" else 1)')}
trap 'trap - INT TERM; kill 0' INT TERM
echo "$(date +%T)  ${#losses[@]} losses × ${#seeds[@]} seeds, $jobs at a time; each run writes its log.txt under $out"
for part in $(seq "$jobs"); do
  python -m xe_retrieval.table "${arguments[@]}" --part="$part/$jobs" &
  while [ ! -f "$out/${losses[0]}-${seeds[0]}/done" ]; do
    kill -0 $! 2>/dev/null || break
    sleep 1
  done
done
failed=0
for _ in $(seq "$jobs"); do wait -n || failed=1; done
[ $failed = 0 ] || { echo "not finished; the same command goes on from here" >&2; exit 1; }
python -m xe_retrieval.table "${arguments[@]}"
