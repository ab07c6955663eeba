"""How much of the bank's levels to take off: figures of the calibration split over a grid.

  python -m benchmarks.correction WORKDIR … [--scale=20,40] [--familiarity=0,0.5] [--split=test]

For every share α of a caption's level and β of an image's (config.bank.query and config.bank.image)
prints PR-AUC / R@1 / image→text R@1, in the mean over the workdirs, which should be seeds of one
config. Settings are chosen here, on validation; the first row of each block is the plain cosine.
"""

import argparse

import numpy as np

from xe_retrieval.calibration import run as runs
from xe_retrieval.evaluation import figures
from xe_retrieval.towers import bank as banks

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--scale", default="", help="of the bank; by default the loss's")
  parser.add_argument("--familiarity", default="0", help="γ")
  parser.add_argument("--split", default="", help="by default config.calibration_split")
  args = parser.parse_args()
  data = [_read(workdir, args.split) for workdir in args.workdirs]
  print("PR-AUC / R@1 / image→text R@1: a row for each α, a column for each β")
  for scale in args.scale.split(","):
    for familiarity in map(float, args.familiarity.split(",")):
      print(f"\nscale {scale or 'of the loss'}, γ {familiarity:g}")
      print(" " * 6 + "".join(f"{'β ' + format(b, 'g'):>24}" for b in SHARES))
      for a in SHARES:
        cells = []
        for b in SHARES:
          c = {"query": a, "image": b, "familiarity": familiarity, "scale": float(scale or 0)}
          cells.append(np.mean([_figures(*one, c) for one in data], axis=0))
        line = "".join("{:>24}".format(" / ".join(f"{x:5.2f}" for x in cell)) for cell in cells)
        print(f"α {a:<4g}{line}", flush=True)


def _read(workdir, split):
  run = runs.Run(workdir)
  _ = run.bank  # before the config changes, which is part of its fingerprint
  return run, run.embed("", split or run.calibration_split)[0]


def _figures(run, pairs, correction):
  run.config.bank.update(correction)
  run.scoring = banks.Scoring(run.config, run.bank)
  found = figures.headline(run.correct(pairs))
  return (
    found["pr_auc"],
    found["text_to_image"]["recall@1"],
    found["image_to_text"]["recall@1"],
  )


if __name__ == "__main__":
  main()
