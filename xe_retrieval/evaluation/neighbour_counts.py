"""How many neighbours each query has above each score: the lines of the paper's score plot."""

import dataclasses

import numpy as np

from xe_retrieval.evaluation import score_tiles

TOP = 100
_ROUNDING = 2.0**-21  # of unit vectors' float32 dot products, with some reserve


@dataclasses.dataclass(frozen=True)
class NeighbourCounts:
  levels: np.ndarray  # float32 [L], rising
  counts: np.ndarray  # int32 [Q, L]: documents that score at least the level
  top: np.ndarray  # float32 [Q, ≤ TOP]: the highest scores, falling

  def at(self, levels):
    """At some of the levels only."""
    column = np.searchsorted(self.levels, levels)
    return NeighbourCounts(self.levels[column], self.counts[:, column], self.top)


def count(text, parts, levels):
  """[Q, D], documents in parts [N, D], rising [L] -> NeighbourCounts, streaming and exact."""
  levels = np.asarray(levels, np.float32)
  # Tolerance for float32 rounding, so that a score counts as ≥ itself.
  barely = levels - np.float32(_ROUNDING)
  counts = np.zeros((len(text), len(levels)), np.int32)
  top = np.full((len(text), min(TOP, sum(map(len, parts)))), -np.inf, np.float32)
  scratch = np.empty(score_tiles.QUERIES * score_tiles.DOCUMENTS, np.float32)
  jobs = [
    (rows, documents)
    for _, documents in score_tiles.stream(parts, score_tiles.DOCUMENTS)
    for rows in score_tiles.spans(len(text), score_tiles.QUERIES)
  ]
  for rows, documents in score_tiles.progress(jobs, "score distributions"):
    scores = np.ascontiguousarray(score_tiles.product(text[rows], documents, scratch))  # [q, n]
    scores.sort(axis=1)
    below = [np.searchsorted(row, barely) for row in scores]
    counts[rows] += len(documents) - np.array(below, np.int32)
    merged = np.concatenate([top[rows], scores[:, -top.shape[1] :]], axis=1)
    merged.sort(axis=1)
    top[rows] = merged[:, : -top.shape[1] - 1 : -1]
  return NeighbourCounts(levels, counts, top)
