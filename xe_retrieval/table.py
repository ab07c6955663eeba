"""Table: python -m xe_retrieval.table --config=configs/flickr8k.py --out=DIR [--config.…=…] …

Trains and evaluates every loss × seed in one process, each in a workdir DIR/LOSS-SEED as `main`
and `evaluate` would, with HTML pages for the first seed only; then compares them. Finished runs are
skipped. launch/table.sh adds installation, data and parallel processes.
"""

import contextlib
import functools
import pathlib
import runpy
import sys
import time

from absl import app, flags
from ml_collections import config_flags

from xe_retrieval import config as config_lib

SPLITS = ("validation", "test")  # calibrated on the first, and judged on the other
_STOPPED = "stopped; the same command goes on from there"


def workdirs(out, losses, seeds):
  """{(loss, seed): workdir}, in the order of seeds."""
  return {(loss, seed): pathlib.Path(out) / f"{loss}-{seed}" for seed in seeds for loss in losses}


def run(config, workdir, distractors=(), splits=SPLITS, report=True, relevance=""):
  """Trains and evaluates unless that is done; False if it was interrupted.

  `relevance`, what people judge, is for the split that is reported: scores are calibrated without.
  """
  from xe_retrieval import evaluate, main

  if is_done(workdir):
    return True
  if int(main.train(config, workdir).step) < config.steps:
    return False
  for split in splits:
    judged = relevance if split != config.calibration_split else ""
    evaluate.evaluate(workdir, split, distractors=distractors, relevance=judged, report=report)
  (workdir / "done").touch()
  return True


def is_done(workdir):
  return (workdir / "done").exists()


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; fields are set as --config.batch_size=64")
  from xe_retrieval import compare, losses

  f = flags.FLAGS
  runs = workdirs(f.out, f.losses or losses.names(), [int(seed) for seed in f.seeds])
  try:
    part, parts = (int(n) for n in f.part.split("/"))
    mine = list(runs)[part - 1 :: parts]
    given = flags.FLAGS["config"]
    overrides = config_flags.get_override_values(given)
    make = functools.partial(configured, config_flags.get_config_filename(given), overrides)
    todo = [key for key in mine if not is_done(runs[key])]
    _run_all(make, runs, todo, f.distractors, f.relevance)
    for split in SPLITS if parts == 1 else ():
      out = pathlib.Path(f.out) / f"comparison-{split}"
      text, page = compare.compare(list(runs.values()), out, split)
      print(f"== {split}\n{text}\ncomparison: {page}", flush=True)
  except ValueError as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    sys.exit(_STOPPED)


def configured(path, overrides, loss, seed):
  """What a config file recommends for a loss, and {field: value} of the command line."""
  config = runpy.run_path(path)["get_config"](loss)
  config.update_from_flattened_dict(overrides)
  config.seed = seed
  return config


def _run_all(make_config, runs, todo, distractors, relevance=""):
  from xe_retrieval.data import image_folder
  from xe_retrieval.evaluation import relevance as relevances

  if todo and relevance:  # now, as the distractors
    relevances.read_judgements(relevance)
  for text in distractors if todo else ():  # now: they are needed only after the first training
    image_folder.open_images(text, make_config(*todo[0]).data.dir)
  first = min(seed for _, seed in runs)
  for n, (loss, seed) in enumerate(todo, 1):
    workdir, began = runs[loss, seed], time.perf_counter()
    workdir.mkdir(parents=True, exist_ok=True)
    config = make_config(loss, seed)
    with (workdir / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
      finished = run(config, workdir, distractors, report=seed == first, relevance=relevance)
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
  flags.DEFINE_string("out", None, "Directory of the workdirs and comparisons.", required=True)
  flags.DEFINE_list("losses", [], "Names of losses; default: all.")
  flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Random seeds.")
  flags.DEFINE_multi_string(
    "distractors", [], "DATASET:SPLIT or folder whose images are searched, too; may be repeated."
  )
  flags.DEFINE_string("relevance", "", "Judgements of people about the test split; see evaluate.")
  flags.DEFINE_string("part", "1/1", "n/N: every N-th run from the n-th on, without comparison.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
