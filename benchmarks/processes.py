"""Two processes against one on the quickstart's model: the same losses, validation and weights?

  python -m benchmarks.processes [--steps=60] [--data=shapes/640]

launch/local_processes.sh starts two processes with one CPU device each. The other run is one
process with two devices, so that both add the gradients of the same two halves of a batch.
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

ROOT = pathlib.Path(__file__).parents[1]


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--data", default="shapes/640")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    script = ROOT / "launch" / "local_processes.sh"
    _train(args, root, "one", [], {"JAX_NUM_CPU_DEVICES": "2"})
    _train(args, root, "two", [script, "2", "--"], {})
    one, two = (_read(root / name) for name in ("one", "two"))
  for name in one:
    difference = max(np.max(np.abs(a - b)) for a, b in zip(one[name], two[name], strict=True))
    print(f"{name}: {len(one[name])} values, largest difference {difference:.2g}")


def _train(args, root, name, launcher, env):
  command = [
    *launcher, sys.executable, "-m", "xe_retrieval.main", "--config=configs/quickstart.py",
    f"--workdir={root / name}", f"--config.data.dir={root / 'data'}", "--config.log_every=1",
    f"--config.data.name={args.data}", f"--config.steps={args.steps}",
    f"--config.eval_every={args.steps // 2}",
  ]  # fmt: skip
  env = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"} | env
  subprocess.run(command, cwd=ROOT, env=env, check=True)


def _read(workdir):
  """{what: [values]} of a finished run."""
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
  found = {
    name: [line[name] for line in lines if name in line]
    for name in ("loss", "gradient_norm/text", "validation/pr_auc", "validation/recall@1")
  }
  leaves = jax.tree.leaves(jax.device_get(models.restore(workdir, "latest").variables))
  return found | {"weights and statistics": leaves}


if __name__ == "__main__":
  main()
