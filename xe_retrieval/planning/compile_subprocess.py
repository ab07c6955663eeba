"""Compiles in a subprocess, because the TPU compiler takes minutes and may abort the process.

Nine tenths of the time goes into machine code, which a plan does not need. XLA therefore dumps the
optimised HLO and its buffer assignment; as soon as both are complete, the subprocess is killed.
"""

import contextlib
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from xe_retrieval.planning import chips

_PROGRAM = "*.after_optimizations_after_buffer_assignment.txt"
_MEMORY = "*.after_optimizations-buffer-assignment.txt"


def compile(request, out, say=lambda line: None):
  """Writes answer.json and program.txt.gz to the directory `out`; ValueError if it fails."""
  out = pathlib.Path(out)
  topology = request["topology"]
  with tempfile.TemporaryFile("w+") as log:
    child = subprocess.Popen(
      [sys.executable, "-m", "xe_retrieval.planning.compile"],
      stdin=subprocess.PIPE,
      stdout=log,
      stderr=log,
      text=True,
      env=_environment(out, dump=not (topology.startswith("cpu:") or request["machine_code"])),
    )
    try:
      with contextlib.suppress(BrokenPipeError):  # it has exited; see its exit code
        child.stdin.write(json.dumps(request | {"out": str(out)}))
        child.stdin.close()
      code = _wait(child, out, f"compiling for {topology}", say)
    finally:
      child.kill()
      child.wait()
    log.seek(0)
    output = log.read()
  file = out / "answer.json"
  answer = json.loads(file.read_text()) if file.exists() else {}
  if "error" in answer:
    raise ValueError(answer["error"])
  if "fits" not in answer:
    raise ValueError(failure(topology, code, output))


def failure(topology, code, output) -> str:
  """One sentence about a subprocess that exited without an answer."""
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  errors = [line for line in lines if re.search(r"Error|Check failed|INVALID|not ", line)] or lines
  reason = f" ({errors[-1][:200]})" if errors else ""
  ended = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
  return f"the compiler for {topology} {ended}{reason}; known topologies are {chips.names()}"


def _environment(out, dump):
  environment = dict(
    os.environ,
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",  # no request to the cloud's metadata server
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no chip is opened, so no lock is needed
    TF_CPP_MIN_LOG_LEVEL="3",
  )
  if dump:
    flags = (
      environment.get("XLA_FLAGS", ""),
      f"--xla_dump_to={out}/dump",
      "--xla_dump_hlo_as_text",
      "--xla_dump_hlo_module_re=jit_(train_step|loss_and_gradients)",
    )
    environment["XLA_FLAGS"] = " ".join(flags).strip()
  return environment


def _wait(child, out, what, say):
  """-> exit code; 0 also when the dump was complete before the subprocess ended."""
  began, size = time.perf_counter(), -1
  while True:
    with contextlib.suppress(subprocess.TimeoutExpired):
      return child.wait(timeout=1)
    say(f"{what}: {time.perf_counter() - began:.0f} s")
    program = next((out / "dump").glob(_PROGRAM), None)
    if program and program.stat().st_size == size:  # no longer growing: complete
      _read_dump(out, program, time.perf_counter() - began)
      return 0
    size = program.stat().st_size if program else -1


def _read_dump(out, program, seconds):
  with gzip.open(out / "program.txt.gz", "wt", compresslevel=5) as f:
    f.write(program.read_text())
  memory = {"arguments": 0, "results": 0, "temporaries": 0, "program": 0}
  for line in next((out / "dump").glob(_MEMORY)).read_text().splitlines():
    found = re.match(r"allocation \d+: size (\d+), (.*)", line)
    if found and not re.search(r"color [1-9]", found[2]):  # other colors are on-chip memory
      kinds = {"parameter": "arguments", "maybe-live-out": "results", "temp": "temporaries"}
      memory[next((v for k, v in kinds.items() if k in found[2]), "program")] += int(found[1])
  traced = json.loads((out / "traced.json").read_text())
  answer = traced | memory | {"fits": True, "compiled_seconds": seconds}
  (out / "answer.json").write_text(json.dumps(answer))
