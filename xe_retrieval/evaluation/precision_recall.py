"""Precision and recall of one global threshold over all caption × image pairs, exactly.

Precision and recall change in a way that matters only at scores of positive pairs, so it is enough
to count, for each of these, the pairs that score at least as much. Tiles are sorted and counted as
they pass: memory grows with the captions, not with the pairs. Scores are float32, and a positive's
own score is taken from the very product in which it is counted: another may round differently.
"""

import collections
import concurrent.futures
import dataclasses
import os

import numpy as np

from xe_retrieval.evaluation import score_tiles


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
  text, image, image_of_text = score_tiles.pairing(text, image, image_of_text)
  parts = score_tiles.parts(image, distractors)
  pairs = len(text) * sum(map(len, parts))
  own, products = (_whole if pairs <= _WHOLE else _tiled)(text, parts, image_of_text)
  levels, positives = np.unique(own, return_counts=True)  # rising
  true = np.cumsum(positives[::-1])
  returned = np.maximum(_count_at_least(levels, products)[::-1], true)
  return Curve(levels[::-1], true, returned, len(text), pairs, own)


def average_precision(scores, positive):
  """[P], bool [P] -> area under the curve of a plain list of pairs; NaN without positives."""
  if not positive.any():
    return np.nan
  levels, true = np.unique(scores[positive], return_counts=True)
  returned = len(scores) - np.searchsorted(np.sort(scores), levels)
  counts = np.cumsum(true[::-1]), returned[::-1]
  return Curve(levels[::-1], *counts, int(positive.sum()), len(scores)).average_precision


def _whole(text, parts, image_of_text):
  """[Q, D], documents in parts, int [Q] -> float32 [Q] own scores, pieces of one product."""
  scores = text @ (np.concatenate(parts) if len(parts) > 1 else parts[0]).T
  own = scores[np.arange(len(text)), image_of_text]
  flat = scores.ravel()
  return own, [lambda _, s=s: flat[s] for s in score_tiles.spans(flat.size, _ROWS * _COLUMNS)]


def _tiled(text, parts, image_of_text):
  """The same with products that are made when they are asked for, in memory that is given."""
  order = np.argsort(image_of_text, kind="stable")  # positives are then in few tiles
  text, right = text[order], image_of_text[order]
  scores, memory = np.empty(len(text), np.float32), np.empty(_ROWS * _COLUMNS, np.float32)
  jobs = []
  for start, documents in score_tiles.stream(parts, _COLUMNS):
    for rows in score_tiles.spans(len(text), _ROWS):
      jobs.append(lambda out, r=rows, d=documents: score_tiles.product(text[r], d, out).ravel())
      column = right[rows] - start
      here = np.flatnonzero((column >= 0) & (column < len(documents)))
      if here.size:
        tile = jobs[-1](memory).reshape(-1, len(documents))
        scores[rows][here] = tile[here, column[here]]
  own = np.empty_like(scores)
  own[order] = scores
  return own, jobs


def _count_at_least(levels, products):
  """Rising float32 [T], functions from memory to scores -> int64 [T]: scores >= each level.

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

  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for product in score_tiles.progress(products, "precision and recall"):
      if not free:
        collect()
      memory = free.pop()
      waiting.append((pool.submit(count, product(memory)), memory))
    while waiting:
      collect()
  return total


_ROWS, _COLUMNS = 1024, 4096  # a tile of 16 MiB
_WHOLE = 2**24  # pairs that are scored at once, in 64 MiB
