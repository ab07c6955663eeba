"""Kills training over and over and checks that nothing is lost.

  python -m benchmarks.faults [--kills=200] [--at_once=2] [--seed=0] [--minutes=60]

Runs with tiny towers are killed at random: SIGKILL during a save, at any step, during startup;
SIGTERM and SIGINT. Each run is restarted in the same workdir until it finishes, then the next one
begins. At the start of each process and at the end, every finished checkpoint is compared, byte by
byte, with that step of a run that was never stopped.

Processes are forks of one that has imported all libraries but TensorFlow, whose threads would not
survive a fork.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

import flax.linen  # noqa: F401  for the forks, like those below
import jax
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import tokenizers  # noqa: F401
import transformers.tokenization_utils_tokenizers  # noqa: F401
from matplotlib import pyplot  # noqa: F401

from configs import quickstart

STEPS = 30
KINDS = {"in a save": 5, "at a step": 2, "at the start": 1, "SIGTERM": 1, "SIGINT": 1}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--at_once", type=int, default=2)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
  parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
  args = parser.parse_args()
  globals()["STEPS"] = args.steps
  began = time.time()
  until = began + 60 * args.minutes
  assert "tensorflow" not in sys.modules
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    jax.config.update("jax_compilation_cache_dir", str(root / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    _run(root / "reference", _train, _config(root, every=1, keep=STEPS))
    reference = _found(root / "reference")
    print(f"reference run of {STEPS} steps: {time.time() - began:.0f} s", flush=True)
    share = [
      args.kills // args.at_once + (i < args.kills % args.at_once) for i in range(args.at_once)
    ]
    workers = [
      _fork(
        lambda i=i: _worker(root / f"worker_{i}", share[i], args.seed * 100 + i, until, reference)
      )
      for i in range(args.at_once)
    ]
    for pid in workers:
      os.waitpid(pid, 0)
    results = [_read(root / f"worker_{i}" / "results.json") for i in range(args.at_once)]
    _report(results, time.time() - began)


def _worker(root, kills, seed, until, reference):
  """Kills `kills` times, or until time is up; writes results.json."""
  root.mkdir()
  draw, config = random.Random(seed), _config(root.parent, every=2, keep=3)
  out = {
    "killed": dict.fromkeys(KINDS, 0),
    "runs": 0,
    "unusable": [],
    "partial": [],
    "different": [],
  }
  more = lambda: sum(out["killed"].values()) < kills and time.time() < until  # noqa: E731
  while more():
    workdir = root / f"run_{out['runs']}"
    done, found = False, {}
    while not done and more():
      kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
      status = _run_and_kill(workdir, config, kind, draw)
      found = _found(workdir)
      wrong = {f"{workdir.name}/{n}" for n in found if found[n] != reference[n]}
      out["partial"] = sorted({*out["partial"], *wrong})
      if status == "killed":
        out["killed"][kind] += 1
      elif status != "done":
        out["unusable"].append(f"{workdir.name}, {kind}: {status}\n{_log(workdir)}")
        break
      done = status == "done"
      print(".", end="", flush=True)
    out["runs"] += 1
    if not done and not out["unusable"]:
      status = _run_and_kill(workdir, config, None, draw)  # to the end, without a kill
      if status != "done":
        out["unusable"].append(f"{workdir.name}: {status}\n{_log(workdir)}")
      found = _found(workdir)
    if found.get(str(STEPS)) != reference[str(STEPS)]:
      out["different"].append(workdir.name)
  (root / "results.json").write_text(json.dumps(out))


def _run_and_kill(workdir, config, kind, draw):
  """Trains in a fork and kills it -> "killed", "done" or an error."""
  before = _lines(workdir)
  pid = _fork(lambda: _train(workdir, config), workdir)
  number = getattr(signal, kind) if kind and kind.startswith("SIG") else signal.SIGKILL
  wait = draw.uniform(0, 8) if kind == "at the start" else draw.uniform(0, 0.04)
  steps, began = draw.randint(1, 8), time.time()
  killed = False
  while True:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
      break
    if time.time() - began > 300:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      return "hung"
    ready = {
      "in a save": lambda: _saving(workdir),
      "at the start": lambda: True,
      None: lambda: False,
    }.get(kind, lambda: _lines(workdir) >= before + steps)()
    if ready and not killed:
      time.sleep(wait)
      os.kill(pid, number)
      killed = True
    time.sleep(0.002)
  code = os.waitstatus_to_exitcode(status)
  if code == -signal.SIGKILL:
    return "killed"
  if code:
    return f"exit code {code}"
  if _newest(workdir) == STEPS:
    return "done"
  return "killed" if killed else "ended early"


def _train(workdir, config):
  """Trains; before and after, writes a digest of every checkpoint."""
  from xe_retrieval import main

  if (workdir / "checkpoints").exists():
    _digest(workdir)
  main.train(config, workdir, jax.devices()[:1])
  _digest(workdir)


def _digest(workdir):
  """Appends a line for every finished checkpoint: step, sha256 of the state."""
  from xe_retrieval import config as config_lib
  from xe_retrieval.data import mesh
  from xe_retrieval.training import step
  from xe_retrieval.training.checkpoints import Checkpoints

  config = config_lib.from_json((workdir / "config.json").read_text())
  like = step.build(config, mesh.make(jax.devices()[:1])).state
  saved = Checkpoints(workdir, read_only=True)
  for n in saved._manager.all_steps():
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(saved.restore(n, like))):
      digest.update(f"{jax.tree_util.keystr(path)}{x.dtype}{x.shape}".encode() + x.tobytes())
    with workdir.with_suffix(".digests").open("a") as file:
      file.write(f"{n} {digest.hexdigest()}\n")


def _found(workdir):
  """{step: digest}; several digests, joined, if that of a step has ever differed."""
  path = workdir.with_suffix(".digests")
  lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
  return {step: " ".join(sorted({d for s, d in lines if s == step})) for step, _ in lines}


def _config(root, every, keep):
  config = quickstart.get_config()
  config.steps, config.batch_size = STEPS, 16
  config.data.name, config.data.dir = "shapes/64", str(root / "data")
  config.text.layers, config.text.width, config.text.heads, config.text.mlp = 1, 16, 2, 16
  config.text.warmup_steps = config.image.warmup_steps = 1
  config.text.dropout = 0.1  # so that the random state matters
  config.image.size, config.image.stem_width = 16, 8
  config.image.depths, config.image.widths = (1,), (16,)
  config.embedding_dim, config.ema_decay = 8, 0.9
  config.log_every, config.eval_every, config.checkpoint_every = 1, 10, every
  config.keep_checkpoints = keep
  return config


def _run(workdir, function, *arguments):
  """Runs a function in a fork and waits for it."""
  status = os.waitstatus_to_exitcode(
    os.waitpid(_fork(lambda: function(workdir, *arguments), workdir), 0)[1]
  )
  if status:
    sys.exit(f"{function.__name__} of {workdir} ended with {status}:\n{_log(workdir)}")


def _fork(function, workdir=None):
  pid = os.fork()
  if pid:
    return pid
  code = 1
  try:
    if workdir:
      workdir.parent.mkdir(exist_ok=True)
      log = os.open(workdir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(log, 1)
      os.dup2(log, 2)
    function()
    code = 0
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    os._exit(code)


def _saving(workdir):
  try:
    return any("tmp" in name for name in os.listdir(workdir / "checkpoints"))
  except OSError:
    return False


def _newest(workdir):
  names = os.listdir(workdir / "checkpoints") if (workdir / "checkpoints").exists() else []
  return max((int(name) for name in names if name.isdecimal()), default=0)


def _lines(workdir):
  try:
    return (workdir / "metrics.jsonl").read_bytes().count(b"\n")
  except OSError:
    return 0


def _log(workdir):
  return workdir.with_suffix(".log").read_text()[-3000:]


def _read(path):
  return json.loads(path.read_text())


def _report(results, seconds):
  killed = {kind: sum(r["killed"][kind] for r in results) for kind in KINDS}
  print(f"\n{sum(killed.values())} kills in {seconds:.0f} s: ", end="")
  print(", ".join(f"{count} {kind}" for kind, count in killed.items()))
  wrong = {
    "unusable workdirs": "unusable",
    "partial checkpoints taken for finished ones": "partial",
    "final states with other bytes": "different",
  }
  for name, field in wrong.items():
    found = [x for r in results for x in r[field]]
    print(f"{len(found)} {name}" + "".join(f"\n  {x}" for x in found))
  print(f"{sum(r['runs'] for r in results)} runs of {STEPS} steps")
  if any(r[field] for r in results for field in wrong.values()):
    sys.exit(1)


if __name__ == "__main__":
  main()
