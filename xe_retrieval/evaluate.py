"""Evaluate: python -m xe_retrieval.evaluate --workdir=DIR [--split=test] [--distractors=D:train] …

Writes metrics.json, thresholds.json, curves.npz and report.html with its plots and tables. That
thresholds.json becomes the one of the workdir, which search and serve cut by, unless the split is
train (on what it has learned, a model looks better than it is) or --thresholds names those chosen.
"""

import json
import pathlib
import sys

from absl import app, flags

from xe_retrieval import command_line


def evaluate(
  workdir,
  split="test",
  out="",
  dataset="",
  distractors=(),
  index="exact",
  judgements=(),
  thresholds="",
  report=True,
):
  """Checkpoint → embeddings → figures → files. Returns the metrics and the path of the report."""
  from xe_retrieval.retrieval import judgements as people

  judged = {pathlib.Path(path).name: people.read(path) for path in judgements}
  chosen = _read_thresholds(thresholds) if thresholds else []

  import numpy as np

  from xe_retrieval.data import pipeline
  from xe_retrieval.report import page
  from xe_retrieval.retrieval import audit, cutoff, embed, evaluation, transfer
  from xe_retrieval.training import features

  encoder = embed.restore(workdir)
  config = encoder.config
  source = pipeline.Source(dataset or config.data.name, config.data.dir, split)
  name = source.name
  pairs = embed.embed(encoder, source, features.of(encoder, source), progress=True)
  extra = []
  for source in [_source(d, config.data.dir) for d in distractors]:
    tables = features.of(encoder, source, ("image",))
    extra.append(embed.images(encoder, source, tables, progress=True))

  result = evaluation.evaluate(pairs, extra or None)
  result.metrics.update(dataset=name, split=split, step=encoder.step, config=config.to_dict())
  result.metrics["training_pairs"] = _training_pairs(config)

  if index == "scann":
    data = (pairs.text, pairs.image, pairs.image_of_text)
    result.metrics["index"] = audit.audit(*data, extra or None)
  if chosen:
    found = transfer.measure(pairs, chosen)
    result.metrics["transfer"] = {"chosen_by": str(thresholds), "thresholds": found}
  if judged:
    found = {name: people.agreement(j, pairs) for name, j in judged.items()}
    result.metrics["judgements"] = found

  out = pathlib.Path(out or default_out(workdir, split, dataset and name))
  out.mkdir(parents=True, exist_ok=True)
  _write_json(out / "metrics.json", result.metrics)
  about = {"model": encoder.fingerprint(), "dataset": name, "split": split, "step": encoder.step}
  about |= {key: result.metrics[key] for key in ("queries", "images")}
  for path in [out] if split == "train" or thresholds else [out, pathlib.Path(workdir)]:
    cutoff.write(path / cutoff.NAME, about, result.thresholds, result.cutoffs)
  np.savez_compressed(out / "curves.npz", **result.curves)
  if not report:
    return result.metrics, None
  title = f"{name} · {split}"
  return result.metrics, page.write(out, title, config.to_dict(), encoder.step, result, pairs)


def default_out(workdir, split, dataset=""):
  """One directory per data set and split under the workdir."""
  name = f"{dataset.replace('/', '_')}_{split}" if dataset else split
  return pathlib.Path(workdir) / "evaluation" / name


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; the run is named as --workdir={argv[1]}")
  command_line.quieten()
  f = flags.FLAGS
  try:
    metrics, report = evaluate(
      f.workdir, f.split, f.out, f.dataset, f.distractors, f.index, f.judgements, f.thresholds
    )
  except ValueError as e:
    sys.exit(f"error: {e}")
  print(_lines(metrics))
  print(f"report: {report}")


def _define_flags():
  """Not on import: the binaries share names of flags, and all can be imported together."""
  flags.DEFINE_string("workdir", None, "The workdir of a training run.", required=True)
  flags.DEFINE_string("dataset", "", "Another data set than the model was trained on.")
  flags.DEFINE_string("split", "test", "The split to evaluate on.")
  flags.DEFINE_multi_string(
    "distractors", [], "DATASET:SPLIT whose images are searched too; may be repeated."
  )
  flags.DEFINE_enum(
    "index", "exact", ["exact", "scann"], "scann also builds an index of all images and audits it."
  )
  flags.DEFINE_multi_string(
    "judgements", [], "File of human judgements in a Flickr8k format; may be repeated."
  )
  flags.DEFINE_string(
    "thresholds", "", "A thresholds.json of another split: what its thresholds give on this one."
  )
  flags.DEFINE_string("out", "", "Where to write; by default WORKDIR/evaluation/SPLIT.")


def _source(distractors, directory):
  from xe_retrieval.data import pipeline

  name, colon, split = distractors.rpartition(":")
  if not colon:
    raise ValueError(
      f"--distractors={distractors} should be DATASET:SPLIT, as in shapes/20000:train"
    )
  return pipeline.Source(name, directory, split)


def _read_thresholds(path):
  try:
    return [
      {"target_precision": float(row["target_precision"]), "threshold": row["threshold"]}
      for row in json.loads(pathlib.Path(path).read_text())["targets"]
    ]
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ValueError(f"--thresholds={path} is no thresholds.json of an evaluation: {e}") from e


def _training_pairs(config):
  """How many captions the model was trained on; None where its data are not at hand."""
  from xe_retrieval.data import pipeline

  try:
    return pipeline.Source(config.data.name, config.data.dir, "train").pairs
  except ValueError:
    return None


def _write_json(path, value):
  path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _lines(metrics):
  """The headline figures for a terminal."""
  rows = [(f"{metrics['queries']:,} × {metrics['images']:,}", metrics)]
  if "distractors" in metrics:
    rows.append((f"+ {metrics['distractors']['images']:,}", metrics["distractors"]))
  names = ("recall@1", "recall@5", "recall@10", "recall@100", "median_rank")
  lines = [" " * 28 + "  PR-AUC" + "".join(f"{n.replace('recall', 'R'):>13}" for n in names)]
  for label, part in rows:
    for direction in ("text_to_image", "image_to_text"):
      if direction in part:
        area = f"{part['pr_auc']:8.2f}" if direction == "text_to_image" else " " * 8
        title = f"{direction.replace('_', ' ')} {label}"
        lines.append(f"{title:28}{area}" + "".join(f"{part[direction][n]:13.2f}" for n in names))
  for row in metrics.get("transfer", {}).get("thresholds", []):
    asked, found = 100 * row["target_precision"], row["precision"]
    found = "nothing is returned" if found is None else f"precision {100 * found:.1f}"
    lines.append(f"chosen elsewhere for precision {asked:.0f}: {found}")
  if metrics.get("training_pairs"):
    lines.append(f"trained on {metrics['training_pairs']:,} pairs")
  if "index" in metrics:
    lines.append(_index_line(metrics["index"]))
  lines += [_judgements_line(*item) for item in metrics.get("judgements", {}).items()]
  return "\n".join(lines)


def _index_line(found):
  near = ", ".join(f"{share:.1f} % of {k}" for k, share in found["neighbours_found"].items())
  drift = ", ".join(f"{n.replace('recall', 'R')} {x:+.2f}" for n, x in found["drift"].items())
  return (
    f"index: {found['kind']}, {found['vectors']:,} vectors, "
    f"built in {found['build_seconds']:.1f} s, {found['queries_per_second']:,.0f} queries/s\n"
    f"  nearest found: {near}; drift it causes: {drift}"
  )


def _judgements_line(name, found):
  keys = ("kendall_tau_c", "kendall_tau_b", "spearman", "pr_auc")
  titles = ("Kendall τc", "τb", "Spearman", "PR-AUC")
  figures = [
    f"{title} {'–' if found[key] is None else format(found[key], '.2f')}"
    for title, key in zip(titles, keys, strict=True)
  ]
  return (
    f"{name}: {', '.join(figures)}\n"
    f"  over {found['pairs']:,} judged pairs; left out: {found['own_captions_left_out']:,} own "
    f"captions, {found['not_in_data_set']:,} not in the data set"
  )


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=command_line.parse)
