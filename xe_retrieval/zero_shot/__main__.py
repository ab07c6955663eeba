"""Classify: python -m xe_retrieval.zero_shot --workdir=W --labels=labels.txt --images=DIR

Which of the labels (one per line of a file) fits each image, by captions made of them, without
training for them; or "none of these". A label fits if the calibrated probability that a caption
with it is relevant to the image reaches --min_probability, or its score a --threshold.

  --template="a photo of {}"   captions of a label; repeated, their vectors are averaged
  --json                       one JSON object per image, with all labels that fit

--pretrained=DIR takes a Hugging Face CLIP or SigLIP as it is; its probabilities are those that
`evaluate --pretrained=DIR --dataset=…` has written to runs/NAME.
"""

import json
import pathlib
import sys

from absl import app, flags

from xe_retrieval import config as config_lib


def zero_shot(
  workdir,
  labels,
  images,
  templates=(),
  pretrained="",
  min_probability=None,
  threshold=None,
  data_dir="",
):
  """-> an Answer per image, and [(image, reason)] of those that cannot be read."""
  if not workdir and not pretrained:
    raise ValueError("classify with what? --workdir=DIR of a training run, or --pretrained=DIR")
  if not images:
    raise ValueError("classify what? --images=DIR, or a data set with its split, shapes/20000:test")
  from xe_retrieval.search import image_sources
  from xe_retrieval.zero_shot import classification

  found = classification.read_labels(labels)
  calibrated = workdir or str(pathlib.Path("runs") / pathlib.Path(pretrained).name)
  classifier = classification.open_classifier(
    pretrained or workdir, found, templates or classification.TEMPLATES, calibrated
  )
  directory = data_dir or classifier.model.config.data.dir
  sources = [image_sources.parse(text, directory) for text in images]
  return classifier.classify(sources, min_probability, threshold)


def main(argv):
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; a folder is given as --images={argv[1]}")
  f = flags.FLAGS
  try:
    answers, failed = zero_shot(
      f.workdir,
      f.labels,
      f.images,
      f.template,
      f.pretrained,
      f.min_probability,
      f.threshold,
      f.data_dir,
    )
  except (OSError, ValueError) as e:
    sys.exit(f"error: {e}")
  for name, reason in failed:
    print(f"skipped {name!a}: {reason}", file=sys.stderr)
  if f.json:
    for answer in answers:
      print(json.dumps(answer.to_dict()))
  else:
    print(table(answers))


def table(answers) -> str:
  """One line per image, and below them how often each label is the best that fits."""
  lines, counts = [], {}
  for answer in answers:
    best = answer.fitting[0] if answer.fitting else answer.nearest
    words = best["label"] if answer.fitting else f"none of these (nearest: {best['label']})"
    known = best["probability"]
    shown = " " * 8 if known is None else f"{100 * known:5.1f} % "
    lines.append(f"{shown} {best['score']:6.3f}  {answer.image}  {words}")
    name = best["label"] if answer.fitting else "none of these"
    counts[name] = counts.get(name, 0) + 1
  lines.append("")
  lines += [f"{n:8,}  {name}" for name, n in sorted(counts.items(), key=lambda x: -x[1])]
  return "\n".join(lines)


def _define_flags():
  flags.DEFINE_string("workdir", "", "A training run, or an exported model.")
  flags.DEFINE_string("pretrained", "", "Instead: a CLIP or SigLIP as it is, directory or id.")
  flags.DEFINE_string("labels", None, "File with one label per line; - is standard input.")
  flags.DEFINE_multi_string("images", [], "Folder, or DATASET:SPLIT; may be repeated.")
  flags.DEFINE_multi_string("template", [], "Caption of a label, which replaces {}; '{}' is one.")
  flags.DEFINE_float("min_probability", None, "From which a label fits; 0.5 by default.", 0, 1)
  flags.DEFINE_float("threshold", None, "Instead: score from which a label fits.")
  flags.DEFINE_bool("json", False, "One JSON object per image and line.")
  flags.DEFINE_string("data_dir", "", "Where data sets lie; by default where the model's lay.")
  flags.mark_flag_as_required("labels")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
