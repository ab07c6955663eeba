#!/usr/bin/env bash
# A search of your own images: prepare, train, evaluate, index, page. Rerun to resume.
#
#   launch/own.sh captions.tsv photos/                # captions.tsv: file name, tab, caption
#   launch/own.sh PRETRAINED photos/                  # no captions: a CLIP or SigLIP as it is, a directory
#                                                     # or a Hugging Face id like openai/clip-vit-base-patch32
# From the environment:
#   NAME    of the data set and its run; default: the name of the folder
#   CONFIG  default: configs/own.py
#   TRAIN   further arguments of the training, as in --config.steps=200
#   SERVE   arguments of the server, default --open; empty: do not start it
set -euo pipefail
[ $# = 2 ] || { sed -n '2,11s/^# \?//p' "$0" >&2; exit 2; }
fail() { echo "error: $*" >&2; exit 1; }
[ -d "$2" ] || fail "$2 is no folder of images"
captions=$1 photos=$(cd "$2" && pwd)
[ ! -f "$captions" ] || captions=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
[ ! -d "$captions" ] || captions=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
source launch/environment.sh
environment

name=${NAME:-$(basename "$photos" | tr -c 'A-Za-z0-9_\n' _ | tr A-Z a-z)}
run=runs/$name data=datasets/captions/$name index=runs/$name/index
if [ -f "$captions" ]; then
  if [ ! -d "$data" ]; then
    echo "== prepare: checks every caption and image, drops duplicates, splits off validation and test"
    python -m xe_retrieval.prepare --captions="$captions" --images="$photos" --name="$name" --out=datasets
    echo "look at what was left out: $data/1.0.0/rejected.tsv"
  fi
  echo "== train: both towers run once over the data, then a projection is trained in minutes"
  python -m xe_retrieval.main --config="${CONFIG:-configs/own.py}:$data" --workdir="$run" ${TRAIN:-}
  echo "== evaluate: how good the search is, and what its scores mean"
  report=$run/evaluation/test/report.html # the last file that evaluate writes
  [ "$report" -nt "$run/metrics.jsonl" ] || python -m xe_retrieval.evaluate --workdir="$run"
  echo "look at plots and examples: $report"
  model=$run
else
  echo "== no captions: $captions searches as it is. Scores have no probability until there are captions"
  model=$captions
fi
echo "== index: embeds what is new or changed in $photos"
python -m xe_retrieval.index --workdir="$model" --images="$photos" --out="$index"
page="python -m xe_retrieval.serve --index=$index"
echo "== the page: $page"
[ -z "${SERVE---open}" ] || exec $page ${SERVE---open}
