"""One global threshold: which cosine to ask for, what it returns, and how sure that is."""

import dataclasses

import numpy as np

TARGETS = (0.5, 0.8, 0.9, 0.95)


@dataclasses.dataclass(frozen=True)
class Point:
  """What returning every pair with `score >= threshold` gives."""

  threshold: float
  precision: float
  recall: float
  returned: int  # pairs
  true: int  # positive pairs among them

  @property
  def f1(self):
    return 2 * self.precision * self.recall / (self.precision + self.recall)


def at_precision(curve, precision):
  """The lowest threshold with at least that precision; None if no threshold reaches it."""
  good = np.flatnonzero(curve.precision >= precision)
  return point(curve, good[-1]) if good.size else None


def best_f1(curve):
  """The threshold with the best harmonic mean of precision and recall."""
  # 2PR/(P+R) = 2·true/(returned + positives)
  return point(curve, np.argmax(curve.true / (curve.returned + curve.positives)))


def point(curve, i):
  return Point(
    float(curve.thresholds[i]),
    float(curve.precision[i]),
    float(curve.recall[i]),
    int(curve.returned[i]),
    int(curve.true[i]),
  )


def table(curve, top, resampled, targets=TARGETS):
  """Curve, float [Q] best score of each query, bootstrap.Curves -> the rows of thresholds.json.

  `interval` holds the middle 95 % of the thresholds that resampled queries would have chosen;
  `precision_interval` that of the precision which this very threshold has on them.
  """
  rows = []
  for target in targets:
    found = at_precision(curve, target)
    row = {"target_precision": target}
    if found is None:
      rows.append(row | {"threshold": None, "best_precision": float(curve.precision.max())})
      continue
    rows.append(row | dataclasses.asdict(found) | _certainty(found, target, top, resampled))
  return rows


def _certainty(found, target, top, resampled):
  return {
    "queries_without_result": float(np.mean(top < found.threshold)),
    "interval": resampled.threshold_interval(target),
    "precision_interval": resampled.precision_interval(found.threshold),
  }
