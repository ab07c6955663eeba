"""Does one threshold mean the same for every query? The paper's point, in numbers.

Percentages are 0–100, scores are cosines.
"""

import math

import numpy as np

from xe_retrieval.retrieval import thresholds

NEIGHBOURS = (1, 10, 100)


def bands(profiles):
  """Between which scores 90 % of the queries have their first, tenth, hundredth neighbour.

  The distance between the paper's two orange lines: the narrower, the better calibrated.
  """
  rows = []
  for k in NEIGHBOURS:
    if k <= profiles.top.shape[1]:
      low, middle, high = map(float, np.percentile(profiles.top[:, k - 1], (5, 50, 95)))
      row = {"neighbours": k, "p5": low, "median": middle, "p95": high, "width": high - low}
      rows.append(row)
  return rows


def needed_scores(profiles, ranks, precision):
  """int [Q] -> float [Q]: the lowest threshold at which this query alone has that precision.

  One image is right, so at most k = ⌊1/precision⌋ may be returned, the right one among them: that
  is the k-th score. NaN where no threshold does it, because k others outscore the right image.
  """
  k = min(math.floor(1 / precision + 1e-9), profiles.top.shape[1])
  return np.where(ranks < k, profiles.top[:, k - 1], np.nan)


def against_global(needed, threshold):
  """float [Q] with NaN, the one global threshold or None -> how the queries' own lie around it."""
  known = needed[~np.isnan(needed)]
  if not known.size:
    return {"reachable": 0.0}
  low, middle, high = map(float, np.percentile(known, (5, 50, 95)))
  row = {"reachable": 100 * known.size / needed.size, "p5": low, "median": middle, "p95": high}
  row["width"] = high - low
  if threshold is not None:
    row["global_threshold"] = threshold
    # For these the global threshold lets in more than the precision allows.
    row["above_global"] = 100 * float(np.mean(known > threshold))
  return row


def summary(curve, profiles, ranks):
  """Curve, Profiles, int [Q] ranks of the right image -> the calibration part of metrics.json."""
  recall, per_query = {}, []
  for target in thresholds.TARGETS:
    found = thresholds.at_precision(curve, target)
    recall[f"{100 * target:.0f}"] = 100 * found.recall if found else 0.0
    needed = needed_scores(profiles, ranks, target)
    row = against_global(needed, found and found.threshold)
    per_query.append({"precision": 100 * target} | row)
  best = thresholds.best_f1(curve)
  return {
    "recall_at_precision": recall,
    "best_f1": {
      "threshold": best.threshold,
      "f1": 100 * best.f1,
      "precision": 100 * best.precision,
      "recall": 100 * best.recall,
      "queries_without_result": 100 * float(np.mean(profiles.top[:, 0] < best.threshold)),
    },
    "bands": bands(profiles),
    "score_needed_per_query": per_query,
  }


def reliability(profiles, own, targets, splits=40, seed=0):
  """Profiles, float [Q] -> float [targets, splits]: precision on queries that did not choose it.

  For each target the threshold is chosen on one half of the queries and measured on the other;
  NaN where the first half reaches no such threshold, or the second returns nothing.
  """
  random = np.random.default_rng(seed)
  half = np.array([random.permutation(len(own)) < len(own) // 2 for _ in range(splits)])  # [S, Q]
  chosen, measured = (_precisions(h.astype(np.float32), profiles, own) for h in (half, ~half))
  out = np.full((len(targets), splits), np.nan)
  for i, target in enumerate(targets):
    good = chosen >= target  # [S, L]; NaN is not
    lowest = measured[np.arange(splits), good.argmax(axis=1)]
    out[i] = np.where(good.any(axis=1), lowest, np.nan)
  return out


def _precisions(draws, profiles, own):  # float32 [S, Q], Profiles, [Q] -> [S, L]
  true = draws @ (own[:, None] >= profiles.levels).astype(np.float32)
  returned = draws @ profiles.counts.astype(np.float32)
  return np.divide(true, returned, out=np.full_like(true, np.nan), where=returned > 0)
