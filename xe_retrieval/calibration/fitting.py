"""Embedded pairs and a source of relevance → a calibrator and the counts that thresholds need."""

import numpy as np

from xe_retrieval.calibration import calibrator as calibrators
from xe_retrieval.calibration import counts as counting
from xe_retrieval.calibration.calibrator import CELL, CELLS, LIMIT, Calibrator, Queries
from xe_retrieval.evaluation import relevance as relevances


def describe(bank, text, features) -> Queries:
  """Bank or None, unit vectors [Q, D], text-tower features [Q, W] -> Queries."""
  if bank is None:
    zeros = np.zeros(len(text))
    return Queries(zeros, zeros, zeros)
  return Queries(*bank.level(text), bank.familiarity(features))


def fit(
  pairs, gallery, relevance, queries: Queries, rare: float = calibrators.RARE
) -> tuple[Calibrator, counting.Counts]:
  """By one source of relevance, on a gallery [Images]; `rare`: see calibrators.fit."""
  gallery = gallery[: relevance.parts]
  asked = queries[relevance.queries]
  cuts = calibrators.grow(asked)
  group = calibrators.assign(cuts, asked)
  half = pairs.image_of_text[relevance.queries] % 2  # captions of one image stay together
  histograms = np.zeros((2, len(cuts) + 1, 2, CELLS), np.int64)
  done = 0
  for _, scores, right in relevances.scored(pairs, gallery, relevance, "calibrating"):
    cells = np.clip(((scores + LIMIT) / CELL).astype(np.int64), 0, CELLS - 1)
    for cell, yes in zip(cells, right, strict=True):
      into = histograms[half[done], group[done]]
      into[0] += np.bincount(cell[yes], minlength=CELLS)
      into[1] += np.bincount(cell[~yes], minlength=CELLS)
      done += 1
  calibrator, others = calibrators.fit(cuts, histograms, asked, rare)
  return calibrator, count(pairs, gallery, relevance, queries, *others)


def count(pairs, gallery, relevance, queries: Queries, *calibrator) -> counting.Counts:
  """Every pair of the gallery, exactly, by its log-odds.

  With two calibrators, the first is for queries of images with even numbers, the second for odd.
  """
  shape = len(relevance.queries), len(counting.LEVELS)
  relevant, own, irrelevant = (np.zeros(shape, np.int32) for _ in range(3))
  every = np.arange(len(gallery[0].vectors))
  columns = np.zeros((2, len(every), len(counting.LEVELS) + 1), np.int32)
  positives, done = 0, 0
  for rows, scores, right in relevances.scored(pairs, gallery, relevance, "counting pairs"):
    mine = pairs.image_of_text[rows]
    levels = np.empty((len(rows), len(counting.LEVELS)))
    for i, one in enumerate(calibrator):
      which = np.flatnonzero(mine % len(calibrator) == i)
      levels[which] = one.score(counting.LEVELS, queries[rows[which]])
    for score, yes, level, m in zip(scores, right, levels, mine, strict=True):
      relevant[done] = _at_least(score[yes], level)
      own[done] = yes[m] & (score[m] >= level)
      irrelevant[done] = _at_least(score[~yes], level)
      passed = np.searchsorted(level, score[: len(every)], side="right")  # how many levels
      passed[m] = 0  # the own image is counted with the query
      columns[1, every, passed] += 1
      columns[0, every, passed] += yes[: len(every)]
      done += 1
    positives += int(right.sum())
  images = sum(len(part.vectors) for part in gallery)
  group = pairs.image_of_text[relevance.queries]
  columns = np.cumsum(columns[:, :, :0:-1], axis=2)[:, :, ::-1]  # pairs from each level on
  return counting.collect(relevant, own, irrelevant, group, images, positives, columns)


def _at_least(scores, levels):
  return len(scores) - np.searchsorted(np.sort(scores), levels)
