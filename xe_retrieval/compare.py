"""Compare: python -m xe_retrieval.compare WORKDIR WORKDIR … [--out=DIR]

Groups evaluated runs by loss, averages over seeds, prints a table and writes compare.html.
"""

import json
import pathlib
import sys

from absl import app, flags

from xe_retrieval import config as config_lib


def compare(workdirs, out="comparison", evaluation="test"):
  """Workdirs -> the table as text, and the path of compare.html."""
  from xe_retrieval.report import comparison

  runs = [_read(pathlib.Path(w), evaluation) for w in workdirs]
  out = pathlib.Path(out)
  out.mkdir(parents=True, exist_ok=True)
  return comparison.write(out, runs)


def main(argv):
  if len(argv) < 2:
    sys.exit("which runs? python -m xe_retrieval.compare WORKDIR WORKDIR … [--out=DIR]")
  try:
    text, page = compare(argv[1:], flags.FLAGS.out, flags.FLAGS.evaluation)
  except ValueError as e:
    sys.exit(f"error: {e}")
  print(text)
  print(f"comparison: {page}")


def _read(workdir, evaluation):
  import numpy as np

  from xe_retrieval.report import comparison

  directory = workdir / "evaluation" / evaluation
  if not (directory / "metrics.json").exists():
    raise ValueError(
      f"{directory} holds no metrics.json; python -m xe_retrieval.evaluate --workdir={workdir} "
      "writes it"
    )
  with np.load(directory / "curves.npz", allow_pickle=False) as curves:
    metrics = json.loads((directory / "metrics.json").read_text())
    return comparison.Run(str(workdir), metrics, dict(curves))


def _define_flags():
  flags.DEFINE_string("out", "comparison", "Directory for compare.html.")
  flags.DEFINE_string(
    "evaluation", "test", "Name of the evaluation: a directory under WORKDIR/evaluation."
  )


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
