"""A config and a topology -> a Plan: compiled in a child process, kept on disk, counted here."""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from xe_retrieval.planning import chips, costs, roofline

# Fields that the compiled step does not depend on.
_ELSEWHERE = (
  *("seed", "steps", "data", "wandb", "profile_steps", "log_every", "eval_every"),
  *("checkpoint_every", "keep_checkpoints", "keep_every"),
)
_SOURCES = ("losses", "towers", "training", "planning/compile.py")


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one chip holds and does in a step."""

  config: dict
  topology: chips.Topology
  memory: dict  # name -> bytes; what the child answered
  fits: bool
  limit: float  # bytes of a chip
  counted: costs.Count | None  # None where it does not fit
  seconds: float  # that compiling took, when it was done

  @property
  def used(self) -> float | None:
    """Bytes per chip at the step's peak; None where the compiler does not tell."""
    if "temporaries" not in self.memory:
      return self.memory.get("used")
    return sum(self.memory[name] for name in ("arguments", "results", "temporaries", "program"))

  @functools.cached_property
  def times(self) -> roofline.Times:
    return roofline.times(self.counted.total, self.topology)

  @functools.cached_property
  def parts(self) -> dict[str, roofline.Times]:
    return {name: roofline.times(c, self.topology) for name, c in self.counted.parts.items()}

  @property
  def pairs_per_second(self) -> float:
    return self.config["batch_size"] / self.times.bound

  @property
  def mfu(self) -> float:
    """Model FLOPs, without recomputation, of the peak."""
    return self.memory["model_flops"] / self.times.bound / self.topology.chip.flops

  @property
  def hours(self) -> float:
    return self.config["steps"] * self.times.bound / 3600


def make(config, topology: str, only="step", limit=None, say=lambda line: None) -> Plan:
  """`config` is a ConfigDict with its architecture filled in; `limit` is bytes per chip."""
  topology = chips.topology(topology)
  fields = json.loads(json.dumps(config.to_dict()))
  limit = limit or topology.chip.memory
  place = _place(fields, topology.name, only)
  if not (place / "answer.json").exists():
    _compile(fields, topology.name, only, place, say)
  answer = json.loads((place / "answer.json").read_text())
  counted = None
  if answer["fits"]:
    with gzip.open(place / "program.txt.gz", "rt") as f:
      counted = costs.count(f.read())
  seconds = answer.get("compiled_seconds", 0.0)
  plan = Plan(fields, topology, answer, answer["fits"], limit, counted, seconds)
  return dataclasses.replace(plan, fits=plan.fits and plan.used <= limit)


def cache() -> pathlib.Path:
  """Where compiled programs are kept."""
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "xe_retrieval" / "plan"


def _place(fields, topology, only):
  """By everything that the compiled program depends on."""
  here = pathlib.Path(__file__).parent.parent
  sources = [
    p for s in _SOURCES for p in ([here / s] if s.endswith(".py") else (here / s).glob("*"))
  ]
  code = [p.read_text() for p in sorted(sources) if p.suffix == ".py"]
  versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")]
  if not topology.startswith("cpu:"):
    versions.append(_libtpu(topology))
  relevant = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
  key = json.dumps([relevant, topology, only, versions, code], sort_keys=True)
  return cache() / hashlib.sha256(key.encode()).hexdigest()[:24]


def _libtpu(topology):
  if not importlib.util.find_spec("libtpu"):
    raise ValueError(
      f"compiling for {topology} needs libtpu: pip install -c constraints.txt -e '.[plan]' "
      "(no TPU is needed; --topology=cpu:8 needs neither)"
    )
  return importlib.metadata.version("libtpu")


def _compile(fields, topology, only, place, say):
  """In a process of its own, which the TPU compiler may end; interrupted, it leaves nothing."""
  place.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=place.parent) as out:
    request = {"config": fields, "topology": topology, "only": only, "out": out}
    code, last = _run(request, topology, say)
    file = pathlib.Path(out) / "answer.json"
    answer = json.loads(file.read_text()) if file.exists() else {}
    if "error" in answer:
      raise ValueError(answer["error"])
    if not answer:
      raise ValueError(_why(topology, code, last))
    with contextlib.suppress(OSError):  # another process was faster
      os.rename(shutil.copytree(out, f"{out}.done"), place)
    shutil.rmtree(f"{out}.done", ignore_errors=True)


def _run(request, topology, say):
  """-> exit code and the last lines of what the child said."""
  environment = dict(
    os.environ,
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",  # never ask the network what machine this is
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_LIBRARY_PATH=os.environ.get("TPU_LIBRARY_PATH", ""),
    TF_CPP_MIN_LOG_LEVEL="3",
  )
  if not environment["TPU_LIBRARY_PATH"]:
    del environment["TPU_LIBRARY_PATH"]
  command = [sys.executable, "-m", "xe_retrieval.planning.compile"]
  with tempfile.TemporaryFile("w+") as log:
    child = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment
    )
    began = time.perf_counter()
    try:
      child.stdin.write(json.dumps(request))
      child.stdin.close()
      while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
          code = child.wait(timeout=1)
          break
        say(f"compiling for {topology}: {time.perf_counter() - began:.0f} s")
    except BaseException:
      child.kill()
      child.wait()
      raise
    log.seek(0)
    return code, log.read()


def _why(topology, code, log):
  """One sentence about a child that gave no answer."""
  lines = [line.strip() for line in log.splitlines() if line.strip()]
  telling = [l for l in lines if "Error" in l or "Check failed" in l or "not" in l.lower()] or lines
  said = f" ({telling[-1][:200]})" if telling else ""
  ended = f"ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
  return f"the compiler for {topology} {ended}{said}; topologies known to work are {chips.names()}"
