"""Config and topology -> Plan: compiles in a subprocess, caches the HLO on disk, counts costs."""

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
import tempfile

from xe_retrieval.planning import chips, compile_subprocess, costs, roofline

# Fields that the compiled step does not depend on.
_IRRELEVANT = (
  *("seed", "steps", "data", "wandb", "profile_steps", "log_every", "eval_every"),
  *("checkpoint_every", "keep_checkpoints", "keep_every"),
)
_SOURCES = ("losses", "towers", "training")  # rooms whose code is compiled into the step
_VERSION = 1  # of the files that compile.py writes


@dataclasses.dataclass(frozen=True)
class Plan:
  """Memory and costs of one chip in a step."""

  config: dict
  topology: chips.Topology
  memory: dict  # name -> bytes, and model_flops: answer.json of the subprocess
  fits: bool
  limit: float  # bytes of a chip
  counted: costs.Count | None  # None if it does not fit

  @property
  def used(self) -> float | None:
    """Bytes per chip at the step's peak; None if the compiler does not report them."""
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
    """Upper bound of the model FLOPs utilisation."""
    return self.memory["model_flops"] / self.times.bound / self.topology.chip.flops

  @property
  def hours(self) -> float:
    return self.config["steps"] * self.times.bound / 3600


def make(
  config, topology: str, only="step", limit=None, machine_code=False, say=lambda line: None
) -> Plan:
  """`config` is a ConfigDict with its architecture filled in; `limit` is bytes per chip.

  only: "step" or "loss". machine_code: finish compiling, for the compiler's own estimate of time.
  """
  topology = chips.topology(topology)
  fields = json.loads(json.dumps(config.to_dict()))
  request = {
    "config": fields, "topology": topology.name, "only": only, "machine_code": machine_code
  }  # fmt: skip
  place = _place(request)
  if not (place / "answer.json").exists():
    _compile(request, place, say)
  answer = json.loads((place / "answer.json").read_text())
  counted = None
  if answer["fits"]:
    with gzip.open(place / "program.txt.gz", "rt") as f:
      counted = costs.count(f.read())
  limit = limit or topology.chip.memory
  plan = Plan(fields, topology, answer, answer["fits"], limit, counted)
  return dataclasses.replace(plan, fits=plan.fits and plan.used <= limit)


def cache() -> pathlib.Path:
  """The directory of compiled programs."""
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "xe_retrieval" / "plan"


def _place(request):
  """The cache entry, named by a hash of everything that the compiled program depends on."""
  package = pathlib.Path(__file__).parent.parent
  code = [path.read_text() for room in _SOURCES for path in sorted((package / room).glob("*.py"))]
  versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")]
  if not request["topology"].startswith("cpu:"):
    versions.append(_libtpu(request["topology"]))
  fields = {name: v for name, v in request["config"].items() if name not in _IRRELEVANT}
  key = json.dumps([_VERSION, request | {"config": fields}, versions, code], sort_keys=True)
  return cache() / hashlib.sha256(key.encode()).hexdigest()[:24]


def _libtpu(topology):
  if not importlib.util.find_spec("libtpu"):
    raise ValueError(
      f"compiling for {topology} needs libtpu: pip install -c constraints.txt -e '.[plan]' "
      "(no TPU is needed; --topology=cpu:8 needs neither)"
    )
  return importlib.metadata.version("libtpu")


def _compile(request, place, say):
  """Fills a cache entry atomically."""
  place.parent.mkdir(parents=True, exist_ok=True)
  out = tempfile.mkdtemp(prefix="unfinished-", dir=place.parent)
  try:
    compile_subprocess.compile(request, out, say)
    for unneeded in (pathlib.Path(out) / "dump", pathlib.Path(out) / "traced.json"):
      shutil.rmtree(unneeded) if unneeded.is_dir() else unneeded.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has filled it
      os.rename(out, place)
  finally:
    shutil.rmtree(out, ignore_errors=True)
