"""Compiles in a process of its own: the TPU compiler may end it, and takes minutes.

Nine tenths of these go into machine code, which a plan does not need. XLA is therefore asked to
write down the optimised program and where its arrays lie; once it has, the child is ended.
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
  """Leaves answer.json and program.txt.gz in the directory `out`; ValueError says what failed."""
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
      with contextlib.suppress(BrokenPipeError):  # its exit code tells
        child.stdin.write(json.dumps(request | {"out": str(out)}))
        child.stdin.close()
      code = _wait(child, out, f"compiling for {topology}", say)
    finally:
      child.kill()
      child.wait()
    log.seek(0)
    said = log.read()
  file = out / "answer.json"
  answer = json.loads(file.read_text()) if file.exists() else {}
  if "error" in answer:
    raise ValueError(answer["error"])
  if "fits" not in answer:
    raise ValueError(why(topology, code, said))


def why(topology, code, said) -> str:
  """One sentence about a child that gave no answer."""
  lines = [line.strip() for line in said.splitlines() if line.strip()]
  telling = [line for line in lines if re.search(r"Error|Check failed|INVALID|not ", line)] or lines
  heard = f" ({telling[-1][:200]})" if telling else ""
  ended = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
  return f"the compiler for {topology} {ended}{heard}; topologies known to work are {chips.names()}"


def _environment(out, dump):
  environment = dict(
    os.environ,
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",  # never ask the network what machine this is
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no chip is opened: others may compile, or train, beside it
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
  """-> exit code; 0 also when the program was written down before the end."""
  began, size = time.perf_counter(), -1
  while True:
    with contextlib.suppress(subprocess.TimeoutExpired):
      return child.wait(timeout=1)
    say(f"{what}: {time.perf_counter() - began:.0f} s")
    program = next((out / "dump").glob(_PROGRAM), None)
    if program and program.stat().st_size == size:  # as before: it is complete
      _read_dump(out, program, time.perf_counter() - began)
      return 0
    size = program.stat().st_size if program else -1


def _read_dump(out, program, seconds):
  with gzip.open(out / "program.txt.gz", "wt", compresslevel=5) as f:
    f.write(program.read_text())
  memory = {"arguments": 0, "results": 0, "temporaries": 0, "program": 0}
  for line in next((out / "dump").glob(_MEMORY)).read_text().splitlines():
    found = re.match(r"allocation \d+: size (\d+), (.*)", line)
    if found and not re.search(r"color [1-9]", found[2]):  # others are memory on the chip
      kinds = {"parameter": "arguments", "maybe-live-out": "results", "temp": "temporaries"}
      memory[next((v for k, v in kinds.items() if k in found[2]), "program")] += int(found[1])
  traced = json.loads((out / "traced.json").read_text())
  answer = traced | memory | {"fits": True, "compiled_seconds": seconds}
  (out / "answer.json").write_text(json.dumps(answer))
