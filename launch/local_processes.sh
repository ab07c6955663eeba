#!/usr/bin/env bash
# N processes of one command on this machine, joined by jax.distributed; process 0 prints.
#
#   launch/local_processes.sh 2 -- python -m xe_retrieval.main --config=… --workdir=…
#
# JAX_NUM_CPU_DEVICES=2 gives each two virtual CPU devices. Ctrl-C and SIGTERM are passed on to all.
# Exits with the code of the first that failed, or with 75 if they were stopped and can go on.
set -euo pipefail
usage() { echo "usage: $0 N -- COMMAND…" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ && ${2:-} == -- && $# -ge 3 ]] || usage
count=$1
shift 2

free='import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])'
port=${PORT:-$("${PYTHON:-python3}" -c "$free")}
export JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$count
processes=()
for ((i = 0; i < count; i++)); do
  JAX_PROCESS_ID=$i "$@" &
  processes+=($!)
done
trap 'woken=1; kill -TERM "${processes[@]}" 2>/dev/null || true' TERM INT

# The first that fails ends them all: the others would wait for it forever.
status=0 left=$count
while ((left)); do
  woken=0 code=0
  wait -n "${processes[@]}" 2> /dev/null || code=$?
  ((woken)) && continue # a signal interrupted wait; no process has ended
  left=$((left - 1))
  if ((code == 75)); then
    ((status)) || status=75 # it has saved; the others end by themselves at the same step
  elif ((code && (!status || status == 75))); then
    status=$code
    sleep "${GRACE:-5}"
    kill -KILL "${processes[@]}" 2>/dev/null || true
  fi
done
exit $status
