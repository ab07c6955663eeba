#!/usr/bin/env bash
# The paper's table: every loss × several seeds, trained, evaluated and compared. Rerun to resume.
#
#   launch/table.sh                  # Flickr8k on two CPU cores: configs/flickr8k.py
#   COCO_IMAGES=train2017 launch/table.sh configs/coco.py         # the same with COCO
#   launch/table.sh configs/cc.py --config.data.dir=datasets      # Conceptual Captions, accelerators
#
# Arguments after the config go to the training. From the environment, paths from the repository:
#   LOSSES       default: all that xe_retrieval.losses knows
#   SEEDS        default: 0 1 2 3 4; COCO: 0 1 2
#   OUT          default: runs/<config>; pages of each split are under it
#   JOBS         runs side by side; default: 2 on a machine without accelerators, else 1
#   DISTRACTORS  DATASET:SPLIT or folder …, whose images are added to the search; default: the train
#                split
#   FLICKR8K     flickr8k.tar (captions.tsv and images/), if not prepared yet
#   COCO_CAPTIONS, COCO_IMAGES   table with splits, and folder of its photos, if not prepared yet
#   COCO_DISTRACTORS             folder of photos without captions, to be searched as well
#   RELEVANCE    whose judgements of the test split count (evaluate --relevance); COCO: eccv, if the
#                package eccv_caption is installed
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
environment

config=${1:-configs/flickr8k.py}
[ $# = 0 ] || shift
fail() { echo "error: $*" >&2; exit 1; }
[ -f "$config" ] || fail "$config does not exist; configs are in configs/"
name=$(basename "$config" .py)
out=${OUT:-runs/$name}
data=datasets seeds="0 1 2 3 4" folder= relevance=
for argument; do
  case $argument in --config.data.dir=*) data=${argument#*=} ;; esac
done
read -ra losses <<< "${LOSSES:-$(python -c 'from xe_retrieval import losses; print(*losses.names())')}"
mkdir -p "$out"
# Runs share compiled functions.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(cd "$out" && pwd)/compiled}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2

# Splits: settings and thresholds are chosen on validation; test is only reported.
case $name in
  flickr8k*)
    prepared=$data/captions/flickr8k
    if [ ! -d "$prepared" ]; then
      tar=${FLICKR8K:-../shared/data/flickr8k.tar}
      [ -f "$tar" ] || fail "neither $prepared nor $tar exists; FLICKR8K=… names the tar, or prepare" \
        "your own copy with a train, a validation and a test split (python -m xe_retrieval.prepare" \
        "--flickr30k=dataset_flickr8k.json --images=… --name=flickr8k)"
      # It has no test split: every sixth photo of train goes there.
      mkdir -p "$data"
      tar -xOf "$tar" captions.tsv | awk -F'\t' -v OFS='\t' '
        $1 == "train" { if (!($2 in n)) n[$2] = count++; if (n[$2] % 6 == 5) $1 = "test" }
        { print }' > "$data/flickr8k.tsv"
      python -m xe_retrieval.prepare --captions="$data/flickr8k.tsv" --images="$tar" \
        --name=flickr8k --out="$data"
    fi
    extra=$(grep -q '"extra"' "$prepared/1.0.0/manifest.json" && echo captions/flickr8k:extra || true)
    distractors="captions/flickr8k:train $extra"
    ;;
  coco*)
    seeds="0 1 2" prepared=$data/captions/coco folder=${COCO_DISTRACTORS:-}
    if [ ! -d "$prepared" ]; then
      table=${COCO_CAPTIONS:-../shared/data/coco_captions.tsv}
      [ -f "$table" ] && [ -d "${COCO_IMAGES:-}" ] ||
        fail "$prepared does not exist, and cannot be made: COCO_CAPTIONS=$table should be a table of" \
          "captions with splits, COCO_IMAGES=${COCO_IMAGES:-} the folder of its photos; or prepare" \
          "COCO with a train, a validation and a test split yourself (python -m xe_retrieval.prepare" \
          "--coco=train=captions_train2017.json … --images=…)"
      python -m xe_retrieval.prepare --captions="$table" --images="$COCO_IMAGES" --name=coco --out="$data"
    fi
    distractors=captions/coco:train
    python -c 'import eccv_caption' 2>/dev/null && relevance=eccv
    ;;
  *) distractors=$(python -c "from configs import $name as c; print(c.get_config().data.name)"):train ;;
esac
read -ra seeds <<< "${SEEDS:-$seeds}"
read -ra distractors <<< "${DISTRACTORS-$distractors}"
[ -z "$folder" ] || distractors+=("$folder")
distractors=("${distractors[@]/#/--distractors=}")

arguments=(--config="$config" --out="$out" --seeds="$(IFS=,; echo "${seeds[*]}")")
arguments+=(--losses="$(IFS=,; echo "${losses[*]}")" "${distractors[@]}")
arguments+=(--relevance="${RELEVANCE-$relevance}" "$@")

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
