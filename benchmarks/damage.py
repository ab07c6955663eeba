"""Damages a checkpoint at random places and counts what reading it says.

  python -m benchmarks.damage [--changes=2000] [--seed=0] [--minutes=60]

A change flips a bit, replaces a byte or a run of bytes, or cuts off the end of a random file.
Reading it must give the same arrays (the place did not matter) or report damage. It must not give
other arrays, nor say that a checkpoint "cannot be read", which is about disks and networks.
"""

import argparse
import collections
import pathlib
import random
import sys
import tempfile
import time

import jax
import numpy as np
from absl import logging

from benchmarks import faults
from xe_retrieval import config as config_lib
from xe_retrieval.data import mesh
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import step
from xe_retrieval.training.checkpoint_reader import Damaged
from xe_retrieval.training.checkpoints import Checkpoints


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--changes", type=int, default=2000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
  args = parser.parse_args()
  until = time.time() + 60 * args.minutes
  logging.set_verbosity(logging.ERROR)
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    state, like = _written(root / "run")
    counts, wrong = collections.Counter(), []
    for file, change, outcome in outcomes(root / "run", 0, like, state, args.changes, args.seed):
      counts[change, outcome.partition(":")[0]] += 1
      if not right(outcome):
        wrong.append(f"{file}, {change}: {outcome}")
        print(wrong[-1], flush=True)
      if time.time() > until:
        break
  for (change, outcome), count in sorted(counts.items()):
    print(f"{count:6,}  {change}: {outcome}")
  print(f"{len(wrong)} wrong of {counts.total():,}")
  sys.exit(bool(wrong))


def right(outcome: str) -> bool:
  return outcome == "the same arrays" or "damaged" in outcome


def outcomes(workdir, n, like, state, changes, seed):
  """Yields (file, kind of change, outcome) for changes of copies of checkpoint n, one at a time."""
  draw, folder = random.Random(seed), workdir / "checkpoints" / str(n)
  files = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)
  for _ in range(changes):
    file, kind = draw.choice(files), draw.choice(sorted(_CHANGES))
    whole = file.read_bytes()
    file.write_bytes(_CHANGES[kind](bytearray(whole), draw))
    try:
      yield str(file.relative_to(folder)), kind, _outcome(workdir, n, like, state)
    finally:
      file.write_bytes(whole)


def _flip(data, draw):
  data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
  return data


def _replace(data, draw):
  place = draw.randrange(len(data))
  data[place] = (data[place] + draw.randrange(1, 256)) % 256
  return data


def _overwrite(data, draw):
  start = draw.randrange(len(data))
  end = min(start + draw.randrange(1, 64), len(data))
  data[start:end] = bytes(end - start) if any(data[start:end]) else b"\xff" * (end - start)
  return data


def _cut(data, draw):
  return data[: draw.randrange(len(data))]


_CHANGES = {
  "a bit is flipped": _flip,
  "a byte is replaced": _replace,
  "bytes are zeroed": _overwrite,
  "the end is cut off": _cut,
}


def _outcome(workdir, n, like, state):
  try:
    with Checkpoints(workdir, read_only=True, say=lambda line: None) as saved:
      read = jax.device_get(saved.restore(n, like))
  except Damaged as error:
    return f"damaged: {error}"
  except Exception as error:
    return f"{type(error).__name__}: {error}"
  same = jax.tree.map(np.array_equal, read, state)
  return "the same arrays" if all(jax.tree.leaves(same)) else "OTHER ARRAYS"


def _written(workdir):
  """A workdir with the checkpoint of an untrained state -> that state, its shapes."""
  config = faults._config(workdir, 1, 1)
  devices = mesh.make(jax.devices()[:1])
  built = step.build(config, devices)
  variables = dual_encoder.init(config, built.model)
  state = step.init(config, jax.device_get(variables), built.optimizer, devices)
  with Checkpoints(workdir) as saved:
    saved.save(state, {"pr_auc": 1.0}, config_lib.to_json(config))
  return jax.device_get(state), built.state


if __name__ == "__main__":
  main()
