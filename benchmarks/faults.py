"""Kills training over and over and checks that nothing is lost.

  python -m benchmarks.faults [--kills=200] [--at_once=2] [--seed=0] [--minutes=60]
  python -m benchmarks.faults --processes=2 --kills=100 --at_once=1

Runs with tiny towers are killed at random: SIGKILL during a save, at any step, during startup;
SIGTERM and SIGINT. With several processes per run, one of them or all are. Each run is restarted in
the same workdir until it finishes, then the next one begins. After each life, every finished
checkpoint is compared, byte by byte, with that step of a run that was never stopped; a run goes on
from the newest one, and none is taken for damaged.

Processes are forks of one that has imported the libraries, and all of them cache what they compile.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback

import jax
import transformers  # noqa: F401  for the forks
from jax._src import compilation_cache, compiler

from configs import quickstart
from xe_retrieval import config as config_lib
from xe_retrieval import main as training
from xe_retrieval.calibration import run  # noqa: F401
from xe_retrieval.data import cpu_tensorflow, mesh  # noqa: F401
from xe_retrieval.evaluation import figures  # noqa: F401
from xe_retrieval.training import loop, processes, step  # noqa: F401
from xe_retrieval.training.checkpoints import Checkpoints

STEPS, PROCESSES = 20, 1
GRACE = 1  # seconds until the others are killed as well; launch/local_processes.sh waits for 5
HUNG = 1800  # seconds
KINDS = {
  "SIGKILL in a save": 5,
  "SIGKILL at a step": 2,
  "SIGKILL at the start": 1,
  "SIGTERM at a step": 1,
  "SIGINT at a step": 1,
}
KINDS_OF_SEVERAL = {
  "SIGKILL of one in a save": 3,
  "SIGKILL of all in a save": 3,
  "SIGTERM of one in a save": 2,
  "SIGKILL of one at a step": 1,
  "SIGKILL of all at the start": 1,
}
WRONG = {
  "unusable workdirs": "unusable",
  "partial checkpoints taken for finished ones": "partial",
  "intact checkpoints taken for damaged ones": "damaged",
  "final states with other bytes": "different",
}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--at_once", type=int, default=2, help="runs side by side")
  parser.add_argument("--processes", type=int, default=1, help="of each run")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
  parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
  args = parser.parse_args()
  globals().update(STEPS=args.steps, PROCESSES=args.processes)
  until = (began := time.time()) + 60 * args.minutes
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    cache = jax.config.jax_compilation_cache_dir or str(root / "cache")
    jax.config.update("jax_compilation_cache_dir", cache)
    compiler._cache_write = _cache
    status = _run_and_kill(root / "reference", _config(root, every=1, keep=STEPS))
    assert status == "done", f"{status}\n{_log(root / 'reference')}"
    reference = _found(root / "reference")
    print(f"reference run of {STEPS} steps: {time.time() - began:.0f} s", flush=True)
    workers = []
    for i in range(args.at_once):
      share, seed = len(range(i, args.kills, args.at_once)), args.seed * 100 + i
      work = lambda: _worker(root / f"worker_{i}", share, seed, until, reference)  # noqa: B023, E731
      workers.append(_fork(work))
    for pid in workers:
      os.waitpid(pid, 0)
    results = [json.loads(path.read_text()) for path in root.glob("worker_*/results.json")]
    _report(results, time.time() - began)


def _worker(root, kills, seed, until, reference):
  """Kills `kills` times, or until time is up; writes results.json."""
  root.mkdir()
  draw, config = random.Random(seed), _config(root.parent, every=2, keep=2)
  kinds = KINDS if PROCESSES == 1 else KINDS_OF_SEVERAL
  out = {"killed": dict.fromkeys(kinds, 0), "runs": 0} | {field: [] for field in WRONG.values()}
  more = lambda: sum(out["killed"].values()) < kills and time.time() < until  # noqa: E731
  while more():
    workdir = root / f"run_{out['runs']}"
    done = False
    while not done:  # the last life is not killed
      new = [kind for kind, count in out["killed"].items() if not count][:1]  # each once, then any
      kind = (new or draw.choices(list(kinds), list(kinds.values())))[0] if more() else None
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
    out["damaged"] += [str(p) for p in workdir.glob("damaged/*")]
    if found.get(str(STEPS)) != reference[str(STEPS)]:
      out["different"].append(workdir.name)
  (root / "results.json").write_text(json.dumps(out))


def _run_and_kill(workdir, config, kind=None, draw=None):
  """Trains in forks and kills one or all -> "killed", "done" or an error."""
  before, saved = _lines(workdir), _newest(workdir)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  running = [
    _fork(lambda i=i: _train(workdir, config, i, address), workdir, i) for i in range(PROCESSES)
  ]
  number = getattr(signal, kind.split()[0]) if kind else None
  victims = [draw.choice(running)] if kind and "of one" in kind else running[:]
  wait = draw.uniform(0, 8 if "start" in kind else 0.04) if kind else 0
  steps, began = draw.randint(1, STEPS // 4) if kind else 0, time.time()
  killed, codes = None, []
  while running:
    for pid in running[:]:
      ended, status = os.waitpid(pid, os.WNOHANG)
      if ended:
        running.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
    hung = time.time() - began > HUNG
    alone = any(code not in (0, training.STOPPED) for code in codes)
    if running and (hung or (alone and time.time() - (killed or began) > GRACE)):
      for pid in running:
        os.kill(pid, signal.SIGKILL)
    if hung:
      return "hung"
    whole = len(running) == PROCESSES
    if kind and whole and not killed and _ready(kind, workdir, before + steps, began):
      time.sleep(wait)
      for pid in victims:
        os.kill(pid, number)
      killed = time.time()
    time.sleep(0.002)
  if os.waitpid(_fork(lambda: _digest(workdir), workdir, "digest"), 0)[1]:
    return "a checkpoint cannot be read"
  resumed = re.search(r"resuming after step (\d+)", _log(workdir))
  if saved and (int(resumed[1]) != saved if resumed else not killed):
    return f"did not go on from step {saved}"
  if not any(codes) and _newest(workdir) == STEPS:
    return "done"
  stopped = codes.count(training.STOPPED) == PROCESSES
  return "killed" if killed and (stopped or number == signal.SIGKILL) else f"exit codes {codes}"


def _ready(kind, workdir, lines, began):
  """Whether the moment to kill has come."""
  if "start" in kind:
    return True
  # Other signals than SIGKILL are handled from the first step on.
  running = _lines(workdir) >= lines or ("SIGKILL" in kind and "save" in kind)
  return running and ("save" not in kind or _saving(workdir, began))


def _train(workdir, config, index, address):
  """Trains -> exit code."""
  if PROCESSES > 1:
    os.environ |= {"JAX_NUM_PROCESSES": str(PROCESSES), "JAX_PROCESS_ID": str(index)}
    os.environ["JAX_COORDINATOR_ADDRESS"] = address
    processes.join()
  state = training.train(config, workdir)
  for number in (signal.SIGTERM, signal.SIGINT):  # came too late
    signal.signal(number, signal.SIG_IGN)
  if PROCESSES > 1:
    jax.distributed.shutdown()  # waits for the others, as at the end of Python
  return 0 if int(state.step) == STEPS else training.STOPPED


def _digest(workdir):
  """Appends a line for every finished checkpoint: step, sha256 of the state."""
  if not (workdir / "checkpoints").exists():
    return
  config = config_lib.from_json((workdir / "config.json").read_text())
  like = step.build(config, mesh.make()).state
  with Checkpoints(workdir, read_only=True) as saved:
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


def _cache(key, seconds, name, backend, executable, callbacks):
  """JAX's own lets only process 0 write, and keys of other processes are others on CPUs."""
  compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))


def _fork(function, workdir=None, index=0):
  pid = os.fork()
  if pid:
    return pid
  code = 1
  try:
    if workdir:
      workdir.parent.mkdir(exist_ok=True)
      log = os.open(workdir.with_suffix(f".{index}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(log, 1)
      os.dup2(log, 2)
    code = function() or 0
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    os._exit(code)


def _saving(workdir, began):
  """Whether this life writes a checkpoint; another may have left an unfinished one."""
  try:
    found = [e for e in os.scandir(workdir / "checkpoints") if "tmp" in e.name]
    return any(e.stat().st_mtime > began for e in found)
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
  logs = sorted(workdir.parent.glob(f"{workdir.name}.*.log"))
  return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


def _report(results, seconds):
  killed = {kind: sum(r["killed"][kind] for r in results) for kind in results[0]["killed"]}
  print(f"\n{sum(killed.values())} kills in {seconds:.0f} s: ", end="")
  print(", ".join(f"{count} {kind}" for kind, count in killed.items()))
  for name, field in WRONG.items():
    found = [x for r in results for x in r[field]]
    print(f"{len(found)} {name}" + "".join(f"\n  {x}" for x in found))
  print(f"{sum(r['runs'] for r in results)} runs of {STEPS} steps, {PROCESSES} process(es) each")
  if any(r[field] for r in results for field in WRONG.values()):
    sys.exit(1)


if __name__ == "__main__":
  main()
