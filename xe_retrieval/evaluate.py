"""Evaluate: python -m xe_retrieval.evaluate --workdir=DIR [--split=test] [--distractors=D:train] …

Writes metrics.json, curves.npz and report.html with its plots and tables under the workdir.
--pretrained=DIR --dataset=D instead evaluates a Hugging Face CLIP or SigLIP as it is. --rerank=W2
also has a re-ranker order the first --candidates, by weights chosen on the calibration split.

What scores mean is fitted once, on the split that config.calibration_split names (validation), and
kept as calibration.json in the workdir, by which search and serve show probabilities. Evaluating
another split judges it: were its promises kept there? If a model has none yet, it is made first.

Several processes share the work (launch/local_processes.sh, --distributed), on a workdir that all
see. Interrupted, the same command goes on from what was embedded.
"""

import functools
import io
import json
import pathlib
import sys

from absl import app, flags

from xe_retrieval import config as config_lib
from xe_retrieval.data import paths


def evaluate(
  workdir,
  split="test",
  out="",
  dataset="",
  distractors=(),
  index="exact",
  judgements=(),
  relevance="",
  publish=False,
  report=True,
  checkpoint="best",
  pretrained="",
  data_dir="",
  rerank="",
  candidates=128,
):
  """Checkpoint → embeddings → figures → files. Returns the metrics and the path of the report."""
  if pretrained:
    workdir, dataset = adopt(pretrained, workdir, dataset, data_dir), ""
  from xe_retrieval.evaluation import judgements as rated
  from xe_retrieval.evaluation import relevance as relevances

  ratings = {pathlib.Path(path).name: rated.read(path) for path in judgements}
  people = relevances.read_judgements(relevance) if relevance else None

  import shutil

  import numpy as np

  from xe_retrieval.calibration import run as runs
  from xe_retrieval.data import paths
  from xe_retrieval.evaluation import figures
  from xe_retrieval.report import page
  from xe_retrieval.search import index_audit
  from xe_retrieval.training import processes

  scratch = out or default_out(workdir, split, dataset)
  if paths.is_remote(scratch):
    scratch = None  # a bucket: what is embedded stays in memory
  else:
    scratch = pathlib.Path(scratch)
    scratch = scratch.with_name(f".{scratch.name}.embeddings")
  run = runs.Run(workdir, distractors, people, checkpoint, scratch)
  second = None
  if rerank:  # before all the work: it may not belong to this model
    from xe_retrieval.reranking import evaluation as second_stage

    second = second_stage.Reranking(rerank, run, candidates)
  plain, name = run.embed(dataset, split)
  pairs = run.correct(plain)
  sources = run.sources(pairs)
  result = figures.evaluate(pairs, run.distractors, sources)
  if run.scoring.correction:
    result.metrics["correction"] = run.scoring.correction
    result.metrics["plain"] = figures.headline(plain, run.plain_distractors, sources)
  result.metrics.update(dataset=name, split=split, step=run.encoder.step)
  result.metrics.update(config=run.config.to_dict(), training_pairs=run.training_pairs())

  own = not dataset and split == run.calibration_split
  calibration = run.calibrate(pairs, sources, name, split) if own or publish else run.calibration()
  if calibration:
    if (own or publish) and processes.is_primary():
      calibration.write(workdir)
    run.judge(calibration, pairs, sources, result.metrics, seen=own or publish)
  if second:
    result.metrics["rerank"] = second.evaluate(dataset, split, pairs)
  if index == "scann":
    data = (pairs.text, pairs.image, pairs.image_of_text)
    extra = [d.vectors for d in run.distractors]
    result.metrics["index"] = index_audit.audit(*data, extra or None)
  if ratings:
    found = {name: rated.agreement(j, pairs) for name, j in ratings.items()}
    result.metrics["judgements"] = found
  if not processes.is_primary():
    return result.metrics, None

  out = paths.given(out or default_out(workdir, split, dataset and name))
  out.mkdir(parents=True, exist_ok=True)
  paths.write(out / "metrics.json", json.dumps(result.metrics, indent=2, allow_nan=False) + "\n")
  curves = io.BytesIO()
  np.savez_compressed(curves, **result.curves)
  paths.write(out / "curves.npz", curves.getvalue())
  if scratch:
    shutil.rmtree(scratch, ignore_errors=True)
  if not report:
    return result.metrics, None
  title, config = f"{name} · {split}", run.config.to_dict()
  return result.metrics, page.write(
    out, title, config, run.encoder.step, result, pairs, sources, calibration
  )


def adopt(pretrained, workdir, dataset, data_dir=""):
  """A workdir for a Hugging Face CLIP or SigLIP as it is, with `dataset` as its data."""
  from xe_retrieval.towers import pretrained as towers
  from xe_retrieval.training import processes

  if not dataset:
    raise ValueError(f"--pretrained={pretrained} needs --dataset=…, the data to evaluate it on")
  workdir = pathlib.Path(workdir or pathlib.Path("runs") / pathlib.Path(pretrained).name)
  with processes.primary_first("adopted"):  # which may have to be fetched
    config = towers.stock_config(pretrained, dataset, data_dir)
    file = workdir / "config.json"
    if file.exists():
      before = config_lib.from_json(file.read_text())
      if changed := config_lib.difference(before, config):
        raise ValueError(
          f"{workdir} is of another model or data set ({changed[0]}); take a new one"
        )
    elif processes.is_primary():
      workdir.mkdir(parents=True, exist_ok=True)
      paths.write(file, config_lib.to_json(config))
  return workdir


def default_out(workdir, split, dataset=""):
  """One directory per data set and split under the workdir."""
  name = f"{dataset.replace('/', '_')}_{split}" if dataset else split
  return paths.given(workdir) / "evaluation" / name


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; the run is named as --workdir={argv[1]}")
  from xe_retrieval.training import processes

  f = flags.FLAGS
  if not f.workdir and not f.pretrained:
    sys.exit("error: evaluate what? --workdir=DIR of a training run, or --pretrained=DIR")
  with processes.together(f.distributed):
    try:
      metrics, report = evaluate(
        f.workdir,
        f.split,
        f.out,
        f.dataset,
        f.distractors,
        f.index,
        f.judgements,
        f.relevance,
        f.publish,
        checkpoint=f.checkpoint,
        pretrained=f.pretrained,
        data_dir=f.data_dir,
        rerank=f.rerank,
        candidates=_candidates(f.candidates),
      )
    except ValueError as e:
      sys.exit(f"error: {e}")
  if not processes.is_primary():
    return
  from xe_retrieval.report import terminal

  print(terminal.evaluation(metrics))
  print(f"report: {report}")


def _candidates(text):
  """ "128" or "all" -> a number, or None for all images."""
  if text != "all" and not (text.isdecimal() and int(text)):
    raise ValueError(f"--candidates={text} should be a number of images, or all")
  return None if text == "all" else int(text)


def _define_flags():
  """Not on import: the binaries share names of flags, and all can be imported together."""
  flags.DEFINE_string("workdir", None, "The workdir of a training run.")
  flags.DEFINE_string(
    "pretrained", "", "Instead: a CLIP or SigLIP as it is; results go to --workdir or runs/NAME."
  )
  flags.DEFINE_string("data_dir", "", "With --pretrained: where data sets lie.")
  flags.DEFINE_string("dataset", "", "Another data set than the model was trained on.")
  flags.DEFINE_string("split", "test", "The split to evaluate on.")
  flags.DEFINE_multi_string(
    "distractors", [], "DATASET:SPLIT, folder or what embed wrote: searched too; repeatable."
  )
  flags.DEFINE_enum(
    "index", "exact", ["exact", "scann"], "scann also builds an index of all images and audits it."
  )
  flags.DEFINE_multi_string(
    "judgements", [], "File of human judgements in a Flickr8k format; may be repeated."
  )
  flags.DEFINE_string(
    "relevance",
    "",
    "Which images people find relevant: a table of caption_id, image[, grade]; eccv or cxc.",
  )
  flags.DEFINE_bool(
    "publish", False, "Calibrate the workdir on these data, although the config names others."
  )
  flags.DEFINE_string("rerank", "", "Workdir of a re-ranker: its second stage is measured, too.")
  flags.DEFINE_string("candidates", "128", "With --rerank: images that it reads per query, or all.")
  flags.DEFINE_enum("checkpoint", "best", ["best", "latest"], "Which checkpoint to evaluate.")
  flags.DEFINE_string("out", "", "Where to write; by default WORKDIR/evaluation/SPLIT.")
  flags.DEFINE_bool(
    "distributed", False, "One of the processes of a SLURM job or TPU pod; JAX finds the others."
  )


if __name__ == "__main__":
  _define_flags()
  parse = functools.partial(config_lib.parse_flags, remote=("workdir", "out"))
  app.run(main, flags_parser=parse)
