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


def levels(own, chosen=()):
  """float [Q] scores of the positive pairs -> all of them, or quantiles; rising float32 [L].

  The thresholds `chosen` are among them, so that what is said of these is not rounded.
  """
  count = max(LEVELS, CELLS // len(own))
  if len(own) <= count:
    return np.unique(own)
  quantiles = np.quantile(own, np.linspace(0, 1, count), method="lower")
  return np.union1d(quantiles, np.asarray(chosen, np.float32))


@dataclasses.dataclass(frozen=True)
class Curves:
  """The precision-recall curve of every sample, at falling thresholds."""

  thresholds: np.ndarray  # float32 [L], falling
  precision: np.ndarray  # float32 [S, L]
  recall: np.ndarray  # float32 [S, L]

  @property
  def average_precision(self):
    return np.sum(np.diff(self.recall, axis=1, prepend=0) * self.precision, axis=1)  # [S]

  def threshold_interval(self, precision):
    """Interval of the lowest threshold with that precision; None if most samples have none."""
    good = self.precision >= precision
    last = good.shape[1] - 1 - good[:, ::-1].argmax(axis=1)
    reached = good.any(axis=1)
    return interval(self.thresholds[last[reached]]) if reached.mean() > 0.5 else None

  def precision_interval(self, threshold):
    """Interval of the precision that one threshold has."""
    return interval(self.precision[:, self._at(threshold)])

  def _at(self, threshold):
    below = np.flatnonzero(self.thresholds <= threshold)
    return below[0] if below.size else -1


def curves(profiles, own, draws):
  """Profiles at `levels(own)`, float [Q], float32 [S, Q] -> Curves."""
  true = (own[:, None] >= profiles.levels).astype(np.float32)  # [Q, L]
  returned = draws @ profiles.counts.astype(np.float32)  # [S, L]
  true = draws @ true
  # A sample in which none of the queries returns anything has nothing wrong either.
  precision = np.divide(true, returned, out=np.ones_like(true), where=returned > 0)
  recall = true / draws.sum(axis=1, keepdims=True)
  return Curves(profiles.levels[::-1], precision[:, ::-1], recall[:, ::-1])
