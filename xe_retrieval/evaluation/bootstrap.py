"""How far each figure would move with other queries of the same kind: the bootstrap over queries.

An image is drawn together with all of its captions: captions of one picture are not independent.
"""

import dataclasses

import numpy as np

SAMPLES = 1000
CELLS = 2**24  # queries × thresholds at which the resampled precision-recall curves are evaluated
LEVELS = 500  # no fewer thresholds than this


@dataclasses.dataclass(frozen=True)
class Draws:
  """How often each query was drawn in each sample."""

  text: np.ndarray  # float32 [S, Q]
  image: np.ndarray  # float32 [S, images with captions]


def draw(image_of_text, samples=SAMPLES, seed=0):
  """int [Q] -> Draws."""
  asked, row = np.unique(image_of_text, return_inverse=True)
  random = np.random.default_rng(seed)
  image = random.multinomial(len(asked), np.full(len(asked), 1 / len(asked)), samples)
  image = image.astype(np.float32)
  return Draws(image[:, row], image)


def mean(draws, values):
  """float32 [S, Q], [Q] -> interval of the mean."""
  return interval(draws @ values.astype(np.float32) / draws.sum(axis=1))


def median(draws, values):
  """float32 [S, Q], [Q] -> interval of the median."""
  order = np.argsort(values)
  weight = np.cumsum(draws[:, order], axis=1)
  half = weight[:, -1:] / 2
  low, high = ((f(weight, half)).argmax(axis=1) for f in (np.greater_equal, np.greater))
  return interval((values[order][low] + values[order][high]) / 2)


def interval(samples):
  """[S] -> [low, high] that hold the middle 95 %."""
  return [float(x) for x in np.percentile(samples, (2.5, 97.5))]


def levels(own):
  """Scores of the positive pairs, float [Q] -> all of them, or quantiles; rising float32 [L]."""
  count = max(LEVELS, CELLS // len(own))
  if len(own) <= count:
    return np.unique(own)
  return np.unique(np.quantile(own, np.linspace(0, 1, count), method="lower"))


@dataclasses.dataclass(frozen=True)
class Curves:
  """The precision-recall curve of every sample, at falling thresholds."""

  thresholds: np.ndarray  # float32 [L], falling
  precision: np.ndarray  # float32 [S, L]
  recall: np.ndarray  # float32 [S, L]

  @property
  def average_precision(self):
    return np.sum(np.diff(self.recall, axis=1, prepend=0) * self.precision, axis=1)  # [S]


def curves(counts, own, draws):
  """PairCounts at `levels(own)`, float [Q], float32 [S, Q] -> Curves."""
  true = draws @ (own[:, None] >= counts.levels).astype(np.float32)  # [S, L]
  returned = draws @ counts.counts.astype(np.float32)
  # Where a sample returns nothing, precision is undefined; its recall is 0, so it has no weight.
  precision = np.divide(true, returned, out=np.zeros_like(true), where=returned > 0)
  recall = true / draws.sum(axis=1, keepdims=True)
  return Curves(counts.levels[::-1], precision[:, ::-1], recall[:, ::-1])
