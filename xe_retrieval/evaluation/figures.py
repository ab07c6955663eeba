"""Everything that is measured of an embedded data set: figures, intervals, curves."""

import dataclasses

import numpy as np

from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.evaluation import (
  bootstrap,
  embedded,
  pair_counts,
  precision_recall,
  ranks,
  relevance_metrics,
  score_spread,
  score_tiles,
)
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.model import Encoder

HAIR = np.arange(-0.5, 1.0001, 0.01, np.float32)  # cosines at which neighbours are counted
HAIRS = 1000  # queries that the plot shows
POINTS = 2000  # of a precision-recall curve that is stored


@dataclasses.dataclass(frozen=True)
class Evaluation:
  metrics: dict  # metrics.json
  curves: dict[str, np.ndarray]  # curves.npz: what the plots show
  ranks: np.ndarray  # int64 [Q], of each caption's image
  top: np.ndarray  # float32 [Q], best score of each caption


def headline(pairs, distractors=(), sources=()):
  """Pairs, [Images], [Relevance] -> the first figures of metrics.json."""
  data = score_tiles.pairing(pairs.text, pairs.image, pairs.image_of_text)
  matches = pair_counts.Matches(*data)
  near = matches.count()
  out = {
    "queries": len(pairs.text),
    "images": len(pairs.image),
    "pr_auc": 100 * precision_recall.from_counts(matches, near).average_precision,
    "text_to_image": ranks.summary(near.outscored),
    "image_to_text": ranks.summary(ranks.image_to_text(*data)),
  }
  if known := sources[:-1]:  # the last one is the pairing
    measure = relevance_metrics.measure
    out["relevance"] = {s.name: measure(pairs, [pairs.images], s)[0] for s in known}
  if distractors:
    parts = [d.vectors for d in distractors]
    every = near + matches.count(parts)
    out["distractors"] = {
      "images": sum(map(len, parts)),
      "pr_auc": 100 * precision_recall.from_counts(matches, every).average_precision,
      "text_to_image": ranks.summary(every.outscored),
    }
  return out


def validation(config, model, tokenizer, source, tables, devices=None):
  """What the training loop measures: a function from variables to `headline` of a split."""
  encoder = Encoder(config, model, None, tokenizer, devices)

  def measure(variables):
    encoder.variables = mesh_lib.local(variables, encoder.mesh)
    try:
      return headline(embedded.embed(encoder, source, tables))
    finally:
      encoder.variables = None  # else a replica of the weights stays on every device

  return measure


def evaluate(pairs, distractors=(), sources=None):
  """Pairs, [Images], [Relevance] -> Evaluation. Distractors count only where it says so."""
  data = text, image, image_of_text = score_tiles.pairing(
    pairs.text, pairs.image, pairs.image_of_text
  )
  sources = sources or relevances.sources(pairs, distractors)
  matches = pair_counts.Matches(*data)
  own = matches.own
  levels = bootstrap.levels(own)
  seen = matches.count(levels=np.union1d(levels, HAIR))
  curve = precision_recall.from_counts(matches, seen)
  forward, backward = seen.outscored, ranks.image_to_text(*data)
  draws = bootstrap.draw(image_of_text)
  resampled = bootstrap.curves(seen.at(levels), own, draws.text)

  figures = {
    "queries": len(text),
    "images": len(image),
    "pr_auc": 100 * curve.average_precision,
    "text_to_image": ranks.summary(forward),
    "image_to_text": ranks.summary(backward),
    "intervals": {
      "pr_auc": _area_interval(curve, seen.at(levels), own, resampled),
      "text_to_image": ranks.intervals(draws.text, forward),
      "image_to_text": ranks.intervals(draws.image, backward),
    },
    "calibration": {
      "ap_global": curve.average_precision,
      **score_spread.between_queries(pairs, sources[-1]),
      "bands": score_spread.bands(seen),
      "best_f1": score_spread.best_f1(curve, seen),
    },
    "relevance": {},
  }
  curves = {
    **_points("", curve),
    **_hair(seen.at(HAIR)),
    **_recall("text_to_image_", forward),
    **_recall("image_to_text_", backward),
    "query_ranks": forward,
    "query_image": image_of_text,
    "query_best": seen.top[:, 0],
  }
  for source in sources[:-1]:  # the last one is the pairing, whose figures are those above
    found, curve_ = relevance_metrics.measure(pairs, [pairs.images], source)
    figures["relevance"][source.name] = found
    curves |= _points(f"{source.name}_", curve_)
  if distractors:
    parts = [d.vectors for d in distractors]
    both = seen.at(levels) + matches.count(parts, levels=levels)
    rank = both.outscored
    curve = precision_recall.from_counts(matches, both)
    resampled = bootstrap.curves(both, own, draws.text)
    figures["distractors"] = {
      "images": sum(map(len, parts)),
      "pr_auc": 100 * curve.average_precision,
      "text_to_image": ranks.summary(rank),
      "intervals": {
        "pr_auc": _area_interval(curve, both, own, resampled),
        "text_to_image": ranks.intervals(draws.text, rank),
      },
    }
    curves |= _points("distractors_", curve) | _recall("distractors_text_to_image_", rank)
  return Evaluation(figures, curves, forward, seen.top[:, 0])


def _area_interval(curve, counts, own, resampled):
  """The samples share a grid of thresholds; its small error is taken off by the exact area."""
  grid = bootstrap.curves(counts, own, np.ones((1, len(own)), np.float32)).average_precision[0]
  low, high = bootstrap.interval(resampled.average_precision)
  return [100 * (curve.average_precision + x - grid) for x in (low, high)]


def _points(prefix, curve):
  """The curve at no more than POINTS of its thresholds, evenly spaced in recall."""
  at = np.unique(np.linspace(0, len(curve.thresholds) - 1, POINTS).astype(int))
  names = ("precision", "recall", "thresholds")
  return {prefix + name: getattr(curve, name)[at].astype(np.float32) for name in names}


def _hair(seen):
  """Neighbours at each score: of some queries, and the two percentiles of all."""
  shown = np.random.default_rng(0).permutation(len(seen.counts))[:HAIRS]
  return {
    "hair_levels": seen.levels,
    "hair": seen.counts[np.sort(shown)],
    "hair_percentiles": np.percentile(seen.counts, (5, 95), axis=0),
  }


def _recall(prefix, rank):
  """Recall@k in percent at k = 1, 2, 3, 4, 5, 6, 8, 10, … 10,000."""
  k = np.unique(np.rint(np.geomspace(1, 10_000, 81)).astype(int))
  return {prefix + "k": k, prefix + "recall": 100 * (rank[:, None] < k).mean(axis=0)}
