"""Two processes against one on the quickstart: the same training, evaluation and index?

  python -m benchmarks.processes [--steps=60] [--data=shapes/640]

launch/local_processes.sh starts two processes with one CPU device each. They train; the other run
is one process with two devices, so that both add the gradients of the same two halves of a batch.
What the two have trained is then evaluated and indexed by two processes and by one.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

from xe_retrieval import model as models
from xe_retrieval.search.collection import Collection

ROOT = pathlib.Path(__file__).parents[1]
LAUNCHERS = {"two": (ROOT / "launch" / "local_processes.sh", "2", "--"), "one": ()}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--data", default="shapes/640")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    one, two = (_train(args, root, who) for who in ("one", "two"))
    for name in one:
      difference = max(np.max(np.abs(a - b)) for a, b in zip(one[name], two[name], strict=True))
      print(f"{name}: {len(one[name])} values, largest difference {difference:.2g}")
    one, two = (_evaluate_and_index(args, root, who) for who in ("one", "two"))
  for name in one:
    same = "the same" if one[name] == two[name] else "OTHER"
    print(f"{name}: {len(one[name]):,} bytes, {same}")
  sys.exit(one != two)


def _train(args, root, who):
  """-> {what: [values]} of a finished run."""
  run = [
    "main", "--config=configs/quickstart.py", f"--workdir={root / who}", "--config.log_every=1",
    f"--config.data.dir={root / 'data'}", f"--config.data.name={args.data}",
    f"--config.steps={args.steps}", f"--config.eval_every={args.steps // 2}",
  ]  # fmt: skip
  _run(who, run, {"one": "2", "two": "1"}[who])
  lines = [json.loads(line) for line in (root / who / "metrics.jsonl").open()]
  found = {
    name: [line[name] for line in lines if name in line]
    for name in ("loss", "gradient_norm/text", "validation/pr_auc", "validation/recall@1")
  }
  leaves = jax.tree.leaves(jax.device_get(models.restore(root / who, "latest").variables))
  return found | {"weights and statistics": leaves}


def _evaluate_and_index(args, root, who):
  """-> {file: bytes} of what is written about the run of two processes."""
  workdir, out = root / "two", root / f"by_{who}"
  (workdir / "calibration.json").unlink(missing_ok=True)  # of the other
  _run(who, ["evaluate", f"--workdir={workdir}", f"--out={out / 'test'}"])
  images = [f"--images={args.data}:{split}" for split in ("test", "train")]
  _run(who, ["index", f"--workdir={workdir}", *images, f"--out={out / 'index'}"])
  files = {
    "metrics.json": out / "test" / "metrics.json",
    "calibration.json": workdir / "calibration.json",
  }
  written = {name: path.read_bytes() for name, path in files.items()}
  index = Collection(out / "index")
  ids = np.concatenate([index.store.known(label)[0] for label in sorted(index.sources)])
  return written | {"vectors of the index": index.store.vectors(ids).tobytes()}


def _run(who, command, devices="1"):
  module, *flags = command
  env = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}
  command = [*LAUNCHERS[who], sys.executable, "-m", f"xe_retrieval.{module}", *flags]
  subprocess.run(command, cwd=ROOT, env=os.environ | env, check=True)


if __name__ == "__main__":
  main()
