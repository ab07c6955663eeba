"""What a bank costs in search: the same queries with corrected scores and with plain cosines.

  python -m benchmarks.corrected_search [--workdir=runs/quickstart/cross_example_softmax]

The bank is that of the workdir; the image vectors are random, which does not change the time.
Queries are answered one at a time and in batches of 64, in turns on both indexes.
"""

import argparse
import pathlib
import tempfile
import time

import xe_retrieval
from benchmarks import serve
from xe_retrieval.calibration import artifact
from xe_retrieval.search import searcher as searchers
from xe_retrieval.towers import bank as banks

ROUNDS = 5


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", default="runs/quickstart/cross_example_softmax")
  parser.add_argument("--images", type=int, default=100_000)
  parser.add_argument("--kind", default="auto", choices=["auto", "exact", "scann"])
  args = parser.parse_args()
  model = xe_retrieval.load(args.workdir)
  known = artifact.read(args.workdir, model.fingerprint())
  if known is None:
    raise SystemExit(
      f"{args.workdir} is not evaluated: python -m xe_retrieval.evaluate makes a bank"
    )
  config = model.config.copy_and_resolve_references()
  plain, corrected = (banks.Scoring(_with(config, share), known.bank) for share in (0.0, 0.5))
  with tempfile.TemporaryDirectory() as folder:
    searchers_ = {}
    for name, scoring in (("plain", plain), ("corrected", corrected)):
      model.scoring = scoring
      path = pathlib.Path(folder) / name / "index"
      path.parent.mkdir()
      serve.make(path, model, args.workdir, args.images, args.kind)
      searchers_[name] = searchers.open_index(path, model=model), scoring
    for count in (1, 64):
      seconds = {name: [] for name in searchers_}
      for turn in range(ROUNDS):
        asked = serve.queries(200, turn)
        for name, (searcher, scoring) in searchers_.items():
          model.scoring = scoring
          list(searcher.answers(asked[:count], top=20, threshold=0.5))
          start = time.perf_counter()
          for i in range(0, 192, count):
            list(searcher.answers(asked[i : i + count], top=20, threshold=0.5))
          seconds[name].append((time.perf_counter() - start) / (192 // count))
      a, b = (1e3 * min(seconds[name]) for name in searchers_)
      print(
        f"{args.images:,} images, {count} queries at once: plain {a:.2f} ms, corrected {b:.2f} ms, "
        f"{b / a:.3f}×; queries/s {count / a * 1e3:,.0f} and {count / b * 1e3:,.0f}"
      )


def _with(config, share):
  config = config.copy_and_resolve_references()
  config.bank = {"query": share, "image": share, "familiarity": share, "scale": 0.0, "size": 4096}
  return config


if __name__ == "__main__":
  main()
