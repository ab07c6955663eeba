"""Table: python -m xe_retrieval.table --config=configs/flickr8k.py --out=DIR [--config.…=…] …

Trains and evaluates every loss × seed in one process, each run in a workdir DIR/LOSS-SEED as
`main` and `evaluate` would make it, the first seed with its pages, the others without; then
compares them. What is done already is not done again.
launch/table.sh does the whole: installation, data, several processes side by side.
"""

import contextlib
import pathlib
import sys
import time

from absl import app, flags
from ml_collections import config_flags

from xe_retrieval import command_line

SPLITS = ("validation", "test")  # thresholds are chosen on the first, and measured on the others


_STOPPED = "stopped; the same command goes on from there"


def workdirs(out, losses, seeds):
  """{(loss, seed): where that run is}; one seed after the other."""
  return {(loss, seed): pathlib.Path(out) / f"{loss}-{seed}" for seed in seeds for loss in losses}


def run(config, workdir, distractors=(), splits=SPLITS, report=True):
  """Trains and evaluates, as far as that is not done; False if it was interrupted."""
  from xe_retrieval import evaluate, train

  if is_done(workdir):
    return True
  if int(train.train(config, workdir).step) < config.steps:
    return False
  for split in splits:
    chosen = workdir / "evaluation" / splits[0] / "thresholds.json"
    thresholds = "" if split == splits[0] else chosen
    evaluate.evaluate(workdir, split, distractors=distractors, thresholds=thresholds, report=report)
  (workdir / "done").touch()
  return True


def is_done(workdir):
  return (workdir / "done").exists()


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; fields are set as --config.batch_size=64")
  command_line.quieten()
  from xe_retrieval import compare, losses

  f = flags.FLAGS
  runs = workdirs(f.out, f.losses or losses.names(), [int(seed) for seed in f.seeds])
  try:
    part, parts = (int(n) for n in f.part.split("/"))
    mine = list(runs)[part - 1 :: parts]
    _run_all(f.config, runs, [key for key in mine if not is_done(runs[key])], f.distractors)
    for split in SPLITS if parts == 1 else ():
      out = pathlib.Path(f.out) / f"comparison-{split}"
      text, page = compare.compare(list(runs.values()), out, split)
      print(f"== {split}\n{text}\ncomparison: {page}", flush=True)
  except ValueError as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    sys.exit(_STOPPED)


def _run_all(config, runs, todo, distractors):
  first = min(seed for _, seed in runs)
  for n, (loss, seed) in enumerate(todo, 1):
    workdir, began = runs[loss, seed], time.perf_counter()
    workdir.mkdir(parents=True, exist_ok=True)
    config = config.copy_and_resolve_references()
    config.loss, config.seed = loss, seed
    with (workdir / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
      finished = run(config, workdir, distractors, report=seed == first)
    if not finished:
      sys.exit(_STOPPED)
    seconds = time.perf_counter() - began
    print(
      f"{time.strftime('%T')}  {n}/{len(todo)}  {loss}, seed {seed}: {seconds:.0f} s", flush=True
    )


def _define_flags():
  config_flags.DEFINE_config_file(
    "config", None, "What to train: a file of configs/, without a loss.", lock_config=True
  )
  flags.mark_flag_as_required("config")
  flags.DEFINE_string("out", None, "Where the workdirs and the comparisons go.", required=True)
  flags.DEFINE_list("losses", [], "Names; all by default.")
  flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Numbers.")
  flags.DEFINE_multi_string(
    "distractors", [], "DATASET:SPLIT whose images are searched too; may be repeated."
  )
  flags.DEFINE_string(
    "part", "1/1", "n/N: only every N-th run, from the n-th on, and no comparison."
  )


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=command_line.parse)
