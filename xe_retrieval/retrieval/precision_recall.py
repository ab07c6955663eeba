"""Precision and recall of one global threshold over all caption × image pairs, exactly.

Precision and recall change in a way that matters only at scores of positive pairs, so it is enough
to count, for each of these, the pairs that score at least as much. Tiles are sorted and counted as
they pass: memory grows with the captions, not with the pairs.
"""

import collections
import concurrent.futures
import dataclasses
import os

import numpy as np

from xe_retrieval.retrieval import tiles


@dataclasses.dataclass(frozen=True)
class Curve:
  """One point per distinct score of a positive pair, highest first: what `score >= t` returns."""

  thresholds: np.ndarray  # float32 [T], falling
  true: np.ndarray  # int64 [T], positive pairs returned
  returned: np.ndarray  # int64 [T], pairs returned
  positives: int  # positive pairs in all
  pairs: int  # pairs in all

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
  text, image, image_of_text = tiles.pairing(text, image, image_of_text)
  own = tiles.own_scores(text, image, image_of_text)
  levels, positives = np.unique(own, return_counts=True)  # rising
  parts = tiles.parts(image, distractors)
  returned = _count_at_least(levels, text, parts)
  true = np.cumsum(positives[::-1])
  pairs = len(text) * sum(map(len, parts))
  return Curve(levels[::-1], true, returned[::-1], len(text), pairs)


def average_precision(scores, positive):
  """[P], bool [P] -> area under the curve of a plain list of pairs; NaN without positives."""
  if not positive.any():
    return np.nan
  levels, true = np.unique(scores[positive], return_counts=True)
  returned = len(scores) - np.searchsorted(np.sort(scores), levels)
  counts = np.cumsum(true[::-1]), returned[::-1]
  return Curve(levels[::-1], *counts, int(positive.sum()), len(scores)).average_precision


def _count_at_least(levels, text, parts):
  """Rising float32 [T], [Q, D], documents in parts -> int64 [T]: pairs with score >= level.

  While one tile is multiplied, which takes every core, threads sort and count those before it.
  """
  workers = min(8, os.cpu_count())
  free = [np.empty(_ROWS * _COLUMNS, np.float32) for _ in range(workers + 1)]
  waiting = collections.deque()  # (count to come, the memory it uses)
  total = np.zeros(len(levels), np.int64)

  def count(scores):
    scores.sort()
    return scores.size - np.searchsorted(scores, levels)

  def collect():
    counts, memory = waiting.popleft()
    np.add(total, counts.result(), out=total)
    free.append(memory)

  jobs = [
    (rows, documents)
    for _, documents in tiles.stream(parts, _COLUMNS)
    for rows in tiles.spans(len(text), _ROWS)
  ]
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for rows, documents in tiles.progress(jobs, "precision and recall"):
      if not free:
        collect()
      memory = free.pop()
      scores = tiles.product(text[rows], documents, memory).ravel()
      waiting.append((pool.submit(count, scores), memory))
    while waiting:
      collect()
  return total


_ROWS, _COLUMNS = 1024, 4096  # a tile of 16 MiB
