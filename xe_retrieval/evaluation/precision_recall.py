"""Precision and recall of one global threshold over all caption × image pairs, exactly.

Precision and recall change in a way that matters only at scores of positive pairs, so it is enough
to count, for each of these, the pairs that score at least as much (pair_counts.py). Memory grows
with the captions, not with the pairs.
"""

import dataclasses

import numpy as np

from xe_retrieval.evaluation import pair_counts, score_tiles


@dataclasses.dataclass(frozen=True)
class Curve:
  """One point per distinct score of a positive pair, highest first: what `score >= t` returns."""

  thresholds: np.ndarray  # float32 [T], falling
  true: np.ndarray  # int64 [T], positive pairs returned
  returned: np.ndarray  # int64 [T], pairs returned
  positives: int  # positive pairs in all
  pairs: int  # pairs in all
  own: np.ndarray | None = None  # float32 [Q], the score of each positive pair, as it was counted

  @property
  def precision(self):
    return self.true / self.returned  # float64 [T]

  @property
  def recall(self):
    return self.true / self.positives  # float64 [T], rising to 1

  @property
  def average_precision(self):
    """Area under the curve as a step function, ties grouped: scikit-learn's definition."""
    return float(np.sum(np.diff(self.recall, prepend=0.0) * self.precision))


def curve(text, image, image_of_text, distractors=None):
  """[Q, D], [M, D], int [Q], [N, D] or a list of such -> Curve over all Q·(M+N) pairs.

  A pair is positive if the caption was written for the image; scores are float32 dot products.
  """
  data = score_tiles.pairing(text, image, image_of_text)
  matches = pair_counts.Matches(*data)
  counts = matches.count(ranks=False)
  if distractors is not None:
    counts += matches.count(score_tiles.parts(data[1], distractors)[1:], ranks=False)
  return from_counts(matches, counts)


def from_counts(matches: pair_counts.Matches, counts: pair_counts.PairCounts) -> Curve:
  """What was counted of captions and their images -> Curve."""
  levels, positives = np.unique(matches.own, return_counts=True)  # rising
  true = np.cumsum(positives[::-1])
  returned = np.maximum(counts.returned[::-1], true)
  queries = len(matches.own)
  return Curve(levels[::-1], true, returned, queries, queries * counts.documents, matches.own)


def average_precision(scores, positive):
  """[P], bool [P] -> area under the curve of a plain list of pairs; NaN without positives."""
  if not positive.any():
    return np.nan
  levels, true = np.unique(scores[positive], return_counts=True)
  returned = len(scores) - np.searchsorted(np.sort(scores), levels)
  counts = np.cumsum(true[::-1]), returned[::-1]
  return Curve(levels[::-1], *counts, int(positive.sum()), len(scores)).average_precision
