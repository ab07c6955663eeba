"""Everything that is measured of an embedded data set: figures, intervals, calibration, curves."""

import dataclasses

import numpy as np

from xe_retrieval.retrieval import (
  bootstrap,
  calibration,
  cutoff,
  metrics,
  precision_recall,
  profiles,
  ranks,
  thresholds,
  tiles,
  truth,
)

HAIR = np.arange(-0.5, 1.0001, 0.01, np.float32)  # cosines at which neighbours are counted
HAIRS = 1000  # queries that the plot shows
TARGETS = np.arange(0.1, 0.96, 0.05)  # precisions of the reliability plot
POINTS = 2000  # of a precision-recall curve that is stored


@dataclasses.dataclass(frozen=True)
class Evaluation:
  metrics: dict  # metrics.json
  thresholds: list[dict]  # the targets of thresholds.json
  cutoffs: dict[str, dict]  # and its curves
  curves: dict[str, np.ndarray]  # curves.npz: what the plots show
  ranks: np.ndarray  # int64 [Q], of each caption's image
  top: np.ndarray  # float32 [Q], best score of each caption


def evaluate(pairs, distractors=None):
  """Pairs, [N, D] or a list of such -> Evaluation. Distractors count only where it says so."""
  data = text, image, image_of_text = tiles.pairing(pairs.text, pairs.image, pairs.image_of_text)
  curve = precision_recall.curve(*data)
  own = curve.own
  forward, backward = ranks.text_to_image(*data), ranks.image_to_text(*data)
  found = [thresholds.at_precision(curve, target) for target in thresholds.TARGETS]
  levels = bootstrap.levels(own, [point.threshold for point in found if point])
  seen = profiles.profiles(text, [image], np.union1d(levels, HAIR))
  draws = bootstrap.draw(image_of_text)
  resampled = bootstrap.curves(seen.at(levels), own, draws.text)

  figures = {
    "queries": len(text),
    "images": len(image),
    "pr_auc": 100 * curve.average_precision,
    "text_to_image": metrics.summary(forward),
    "image_to_text": metrics.summary(backward),
    "intervals": {
      "pr_auc": _area_interval(curve, seen.at(levels), own, resampled),
      "text_to_image": metrics.intervals(draws.text, forward),
      "image_to_text": metrics.intervals(draws.image, backward),
    },
    "calibration": calibration.summary(curve, seen, forward),
  }
  table = thresholds.table(curve, seen.top[:, 0], resampled)
  cutoffs = {"pairing": cutoff.points(curve)}
  curves = {
    **_points("", curve),
    **_hair(seen.at(HAIR)),
    **_recall("text_to_image_", forward),
    **_recall("image_to_text_", backward),
    "reliability_targets": TARGETS,
    "reliability": calibration.reliability(seen.at(levels), own, TARGETS),
  }
  if pairs.relevant is not None:
    known = truth.measure(text, image, pairs.relevant)
    figures["true_relevance"] = _true(known, table)
    curves |= _points("true_", known.curve())
    cutoffs["truth"] = cutoff.points(known.curve())
  if distractors is not None:
    parts = tiles.parts(image, distractors)[1:]
    far = profiles.profiles(text, parts, levels)
    both = dataclasses.replace(far, counts=far.counts + seen.at(levels).counts)
    rank = ranks.text_to_image(*data, parts)
    curve = precision_recall.curve(*data, parts)
    resampled = bootstrap.curves(both, own, draws.text)
    figures["distractors"] = {
      "images": sum(map(len, parts)),
      "pr_auc": 100 * curve.average_precision,
      "text_to_image": metrics.summary(rank),
      "intervals": {
        "pr_auc": _area_interval(curve, both, own, resampled),
        "text_to_image": metrics.intervals(draws.text, rank),
      },
    }
    curves |= _points("distractors_", curve) | _recall("distractors_text_to_image_", rank)
  return Evaluation(figures, table, cutoffs, curves, forward, seen.top[:, 0])


def _area_interval(curve, seen, own, resampled):
  """The samples share a grid of thresholds; its small error is taken off by the exact area."""
  grid = bootstrap.curves(seen, own, np.ones((1, len(own)), np.float32)).average_precision[0]
  low, high = bootstrap.interval(resampled.average_precision)
  return [100 * (curve.average_precision + x - grid) for x in (low, high)]


def _true(known, table):
  """Truth -> its part of metrics.json; adds the true precision to each row of thresholds.json."""
  per_query = []
  for row, needed in zip(table, known.needed, strict=True):
    found = row["threshold"]
    row["true_precision"] = None if found is None else known.precision_at(found)
    spread = calibration.against_global(needed, found)
    per_query.append({"precision": 100 * row["target_precision"]} | spread)
  curve = known.curve()
  return {
    "pr_auc": 100 * curve.average_precision,
    "relevant_per_query": curve.positives / known.needed.shape[1],
    "score_needed_per_query": per_query,
  }


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
