"""The model card of an exported model: how to use it, then data, figures, intended use, limits."""

import json

from xe_retrieval.data import paths
from xe_retrieval.towers import bank

_HEAD = """\
---
library_name: xe_retrieval
pipeline_tag: image-feature-extraction
tags: [image-text-retrieval, cross-example-softmax]
---
"""
_USE = """\

## Intended use

Searching a collection of images by text, where an answer may be that nothing is relevant. Scores
were calibrated for captions like those of {dataset}; on other kinds of images or text, evaluate
again before probabilities are relied on.

## Limits

- What captions do not say, the model has not learned. Counting, reading text and spatial relations
  are weak in models of this kind.
- Queries in other languages than the captions' count as unfamiliar: nothing is relevant to them.
- The data's biases are the model's. It is not for identifying people, nor for decisions about them.
"""


def write(workdir, out, config) -> None:
  """Adds to OUT/README.md what the evaluations of the workdir have found."""
  path = out / "README.md"
  folder = paths.given(workdir) / "evaluation"
  found = sorted(folder.glob("*/metrics.json")) if folder.exists() else []
  figures = "".join(_figures(json.loads(file.read_text())) for file in found)
  figures = figures or "\nNot evaluated: `python -m xe_retrieval.evaluate` has not been run.\n"
  use = _USE.format(dataset=config.data.name or "its training data")
  path.write_text(f"{_HEAD}\n{path.read_text()}\n## Evaluation\n{figures}{use}")


def _figures(metrics):
  """One split: recall and PR-AUC with their 95 % intervals, and how true probabilities were."""
  between = metrics.get("intervals", {})
  lines = [
    f"\n{metrics.get('dataset', '')} {metrics.get('split', '')}, {metrics['queries']:,} captions × "
    f"{metrics['images']:,} images; scores: {bank.in_words(metrics.get('correction'))}\n",
    "| | figure | 95 % interval |",
    "|---|---|---|",
    _row("PR-AUC", metrics["pr_auc"], between.get("pr_auc")),
  ]
  for way in ("text_to_image", "image_to_text"):
    for name in ("recall@1", "recall@5", "recall@10"):
      label = f"{way.replace('_', ' ')} {name.replace('recall', 'R')}"
      lines.append(_row(label, metrics[way][name], between.get(way, {}).get(name)))
  for gallery in metrics.get("probabilities", {}).get("galleries", []):
    for name, shown in gallery["relevance"].items():
      where = f"relevance by {name}, {gallery['images']:,} images"
      lines.append(_row(f"calibration error (ECE; {where})", shown["ece"], None, 3))
  return "\n".join(lines) + "\n"


def _row(label, value, interval, digits=2):
  shown = f"{interval[0]:.{digits}f} – {interval[1]:.{digits}f}" if interval else ""
  return f"| {label} | {value:.{digits}f} | {shown} |"
