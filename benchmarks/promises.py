"""Are probabilities true and promises kept? Evaluated runs, in the mean over seeds.

  python -m benchmarks.promises WORKDIR … [--split=test]

Runs with the same loss and data set are seeds of one row. For each source of relevance and size of
the gallery: the expected calibration error and Brier score of the probability beside the first ten
results, the precision kept of each one promised, and how many of the guarantees given were
kept. A promise that the calibration does not give, or that returns nothing, is a dash.
"""

import argparse
import collections
import json
import pathlib

import numpy as np

from xe_retrieval.calibration.promises import TARGETS


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--split", default="test", help="directory under WORKDIR/evaluation")
  args = parser.parse_args()
  groups = collections.defaultdict(list)
  for workdir in args.workdirs:
    path = pathlib.Path(workdir) / "evaluation" / args.split / "metrics.json"
    metrics = json.loads(path.read_text())
    groups[metrics["dataset"], metrics["config"]["loss"]].append(metrics)
  targets = "".join(f"{f'{100 * t:.0f} %':>8}" for t in TARGETS)
  print(f"{'relevant':10}{'images':>8}{'ECE':>8}{'Brier':>8}{targets}   guarantees kept")
  kept_of_all = [0, 0]
  for (dataset, loss), seeds in groups.items():
    print(f"\n{dataset}, {loss}, {len(seeds)} seeds")
    for relevance, images, shown in _places(seeds):
      row = f"{relevance:10}{images:>8,}"
      row += "".join(f"{np.mean([s[key] for s in shown]):8.3f}" for key in ("ece", "brier"))
      promises = [
        p
        for m in seeds
        for p in m["promises"]
        if (p["relevance"], p["gallery"]) == (relevance, images)
      ]
      for target in TARGETS:
        kept = _kept(promises, target, guarantee=False)
        row += f"{100 * np.mean(kept):8.1f}" if kept else f"{'–':>8}"
      right = [k >= t for t in TARGETS for k in _kept(promises, t, guarantee=True)]
      kept_of_all = [kept_of_all[0] + sum(right), kept_of_all[1] + len(right)]
      print(f"{row}{sum(right):>11} of {len(right)}")
  if kept_of_all[1]:
    print(f"\nguarantees kept: {kept_of_all[0]} of {kept_of_all[1]}")


def _places(seeds):
  """Yields (source of relevance, images, its figures in each seed)."""
  found = collections.defaultdict(list)
  for metrics in seeds:
    for gallery in metrics["probabilities"]["galleries"]:
      for relevance, shown in gallery["relevance"].items():
        found[relevance, gallery["images"]].append(shown)
  for (relevance, images), shown in found.items():
    yield relevance, images, shown


def _kept(promises, target, guarantee):
  rows = [p for p in promises if p["target"] == target and p["guarantee"] == guarantee]
  return [p["kept"] for p in rows if p["kept"] is not None]


if __name__ == "__main__":
  main()
