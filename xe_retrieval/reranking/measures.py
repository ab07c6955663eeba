"""Figures of re-ranked candidate lists, and how first stage and joint logit are weighed.

The final score of a candidate is scale·s + weight·logit, s being the first stage's score. All pairs
that were not read lie below those that were: a caption whose image is not among its candidates
keeps the rank that it had.
"""

import dataclasses

import numpy as np

from xe_retrieval.calibration import calibrator as calibrators
from xe_retrieval.calibration.calibrator import CELL, CELLS, LIMIT, Calibrator, Queries
from xe_retrieval.calibration.promises import TOP, reliability
from xe_retrieval.evaluation import ranks
from xe_retrieval.evaluation.precision_recall import Curve

WEIGHTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0)


@dataclasses.dataclass(frozen=True)
class Lists:
  """Candidates of every caption, best of the first stage first, with both scores."""

  images: np.ndarray  # int [Q, K]
  first: np.ndarray  # float32 [Q, K]: scale · score of the first stage
  logits: np.ndarray  # float32 [Q, K]
  own: np.ndarray  # bool [Q, K]: the caption was written for the image
  before: np.ndarray  # int64 [Q]: rank of the own image in the first stage
  gallery: int  # number of images

  def __post_init__(self):
    assert self.images.shape == self.first.shape == self.logits.shape == self.own.shape

  def final(self, weight):  # -> float32 [Q, K]
    return self.first + np.float32(weight) * self.logits


def rank(lists: Lists, final):
  """float [Q, K] -> int64 [Q]: how many images outscore the own one."""
  inside = lists.own.any(axis=1)
  at = lists.own.argmax(axis=1)[:, None]
  bar = np.take_along_axis(final, at, axis=1)
  before = np.arange(final.shape[1]) < at
  found = np.sum((final > bar) | ((final == bar) & before), axis=1)
  return np.where(inside, found, np.maximum(lists.before, final.shape[1]))


def pr_auc(lists: Lists, final) -> float:
  """Percent: average precision over all caption × image pairs, unread ones below in one tie."""
  levels, true = np.unique(final[lists.own], return_counts=True)
  rest = np.sort(final, axis=None)
  returned = rest.size - np.searchsorted(rest, levels)
  true, returned = np.cumsum(true[::-1]), returned[::-1]
  queries, pairs = len(final), len(final) * lists.gallery
  if not len(true) or true[-1] < queries:
    true, returned = np.append(true, queries), np.append(returned, pairs)
  return 100 * Curve(levels[::-1], true, returned, queries, pairs).average_precision


def figures(lists: Lists, weight) -> dict:
  """Recall and PR-AUC of the final score."""
  final = lists.final(weight)
  return {"text_to_image": ranks.summary(rank(lists, final)), "pr_auc": pr_auc(lists, final)}


def choose_weight(lists: Lists) -> float:
  """That of WEIGHTS with the highest mean of Recall@1, @5, @10 and PR-AUC."""

  def quality(weight):
    found = figures(lists, weight)
    recall = [found["text_to_image"][f"recall@{k}"] for k in (1, 5, 10)]
    return np.mean([*recall, found["pr_auc"]])

  return max(WEIGHTS, key=quality)


@dataclasses.dataclass(frozen=True)
class Meaning:
  """Final score -> probability that a candidate is relevant, one rising curve for all captions."""

  curve: Calibrator
  unit: float  # by which scores are divided, so that they lie where calibrators count

  def probability(self, final):  # float [Q, K] -> float64 [Q, K]
    logit = self.curve.logit(final / self.unit, _nothing_known(len(final)))
    return 0.5 * (1 + np.tanh(logit / 2))

  def to_dict(self):
    return {"unit": self.unit} | self.curve.to_dict()

  @classmethod
  def from_dict(cls, fields):
    return cls(Calibrator.from_dict(fields), float(fields["unit"]))


def calibrate(lists: Lists, weight) -> Meaning:
  """Fits the curve to these lists."""
  final = lists.final(weight)
  unit = max(float(np.abs(final).max()) / (0.99 * LIMIT), 1e-9)
  cells = np.clip(((final / unit + LIMIT) / CELL).astype(np.int64), 0, CELLS - 1)
  histograms = np.zeros((2, 1, 2, CELLS), np.int64)
  for half in range(2):
    rows = np.arange(len(final)) % 2 == half
    for kind, own in enumerate((lists.own, ~lists.own)):
      histograms[half, 0, kind] = np.bincount(cells[rows][own[rows]], minlength=CELLS)
  return Meaning(calibrators.fit(np.zeros(0), histograms, _nothing_known(0), rare=0)[0], unit)


def calibration(lists: Lists, weight, meaning: Meaning) -> dict:
  """ECE, Brier score and reliability of the first ten results of every caption."""
  final = lists.final(weight)
  top = np.argsort(-final, axis=1, kind="stable")[:, :TOP]
  shown = meaning.probability(np.take_along_axis(final, top, axis=1))
  return reliability(shown.ravel(), np.take_along_axis(lists.own, top, axis=1).ravel())


def _nothing_known(count):
  return Queries(*np.zeros((3, count)))
