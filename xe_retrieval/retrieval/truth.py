"""Precision against what is true of each image, where that is known, not only against the pairing.

"a red circle" was written for one scene, but is true of many. On drawn data we know of which.
"""

import dataclasses

import numpy as np

from xe_retrieval.retrieval import precision_recall, thresholds, tiles

STEPS = 2**20  # scores are rounded to 2⁻²⁰ here, since any of the pairs can be a positive


@dataclasses.dataclass(frozen=True)
class Truth:
  returned: np.ndarray  # int64 [2·STEPS + 1]: pairs with cosine >= 1, 1 - 1/STEPS, … -1
  true: np.ndarray  # int64 [2·STEPS + 1]: relevant pairs among them
  needed: np.ndarray  # float32 [targets, Q]: lowest threshold at which the query has the precision

  def precision_at(self, threshold):
    """Share of the pairs with `score >= threshold` that are relevant; None if there are none."""
    i = np.clip(STEPS - np.rint(threshold * STEPS).astype(int), 0, 2 * STEPS)
    return float(self.true[i] / self.returned[i]) if self.returned[i] else None

  def curve(self):
    """The precision-recall curve over true relevance."""
    at = np.flatnonzero(np.diff(self.true, prepend=0))
    levels = (1 - at / STEPS).astype(np.float32)
    counts = self.true[at], self.returned[at]
    return precision_recall.Curve(levels, *counts, int(self.true[-1]), int(self.returned[-1]))


def measure(text, image, relevant, targets=thresholds.TARGETS):
  """[Q, D], [M, D], (int [q]) -> bool [q, M] -> Truth, streaming."""
  returned, true = np.zeros(2 * STEPS + 1, np.int64), np.zeros(2 * STEPS + 1, np.int64)
  needed = np.full((len(targets), len(text)), np.nan, np.float32)
  for rows in tiles.progress(tiles.spans(len(text), 256), "true relevance"):
    truth = relevant(np.arange(rows.start, rows.stop))  # [q, M]
    scores = tiles.product(text[rows], image)
    step = STEPS - np.rint(np.clip(scores, -1, 1) * STEPS).astype(np.int32)
    returned += np.bincount(step.ravel(), minlength=len(returned))
    true += np.bincount(step[truth], minlength=len(true))
    order = np.argsort(step, axis=1, kind="stable")
    hits = np.cumsum(np.take_along_axis(truth, order, axis=1), axis=1)
    precision = hits / np.arange(1, len(image) + 1)  # [q, M] of the first 1, 2, … images
    for i, target in enumerate(targets):
      needed[i, rows] = _lowest(np.take_along_axis(scores, order, axis=1), precision >= target)
  return Truth(np.cumsum(returned), np.cumsum(true), needed)


def _lowest(scores, good):
  """Falling [q, M], bool [q, M] -> the last score at which it is good, NaN if at none."""
  last = good.shape[1] - 1 - good[:, ::-1].argmax(axis=1)
  return np.where(good.any(axis=1), scores[np.arange(len(scores)), last], np.nan)
