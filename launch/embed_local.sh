#!/usr/bin/env bash
# Embeds a collection by N processes on this machine, each with its own share of the cores: on CPUs
# two processes with a core each are faster than one with two.
#
#   launch/embed_local.sh 2 --workdir=W --images=DIR --out=OUT
#
# PARTS=64 divides the collection into 64 parts instead of N, as other machines do that embed the
# same OUT. Started again, it goes on from there. Ctrl-C and SIGTERM are passed on to all; exits with
# the code of the first that failed.
set -euo pipefail
usage() { echo "usage: $0 N --workdir=… --images=… --out=…" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ && $# -ge 2 ]] || usage
count=$1 parts=${PARTS:-$1}
shift

# The cores of this process, as 0-3,8 -> 0 1 2 3 8.
cores=()
IFS=, read -ra spans <<< "$(taskset -cp $$ | sed 's/.*: //')"
for span in "${spans[@]}"; do
  for ((core = ${span%-*}; core <= ${span#*-}; core++)); do cores+=("$core"); done
done

share() { # of process $1, as 0,2; all cores where there are more processes than cores
  local own=() i
  for ((i = $1; i < ${#cores[@]}; i += count)); do own+=("${cores[i]}"); done
  ((count <= ${#cores[@]})) || own=("${cores[@]}")
  (IFS=,; echo "${own[*]}")
}

work() { # parts $1, $1 + N, …
  local i child=
  trap 'stopped=1; kill -TERM $child 2> /dev/null || true' TERM
  for ((i = $1; i <= parts; i += count)); do
    [[ -z ${stopped:-} ]] || exit 143
    taskset -c "$(share $(($1 - 1)))" python -m xe_retrieval.embed "${@:2}" --part="$i/$parts" &
    child=$!
    [[ -z ${stopped:-} ]] || kill -TERM $child
    local code=0
    wait $child || code=$?
    [[ -z ${stopped:-} ]] || { code=0; wait $child || code=$?; }
    ((code == 0)) || exit $code
  done
}

workers=()
for ((i = 1; i <= count; i++)); do
  work "$i" "$@" &
  workers+=($!)
done
trap 'kill -TERM "${workers[@]}" 2> /dev/null || true' TERM INT

status=0
for worker in "${workers[@]}"; do
  code=0
  while :; do # a signal interrupts wait
    wait "$worker" && code=0 || code=$?
    kill -0 "$worker" 2> /dev/null || break
  done
  ((status)) || status=$code
done
exit $status
