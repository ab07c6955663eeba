"""A lower confidence bound of a precision whose pairs come in groups."""

import numpy as np
from scipy import stats

FEW = 5  # expected hits or misses below which the spread between groups is not trusted


def precision(relevant, returned, squares, confidence, again=False):
  """int [L], int [L], float [4, L]: see Counts.squares -> float64 [L]; 0: nothing known.

  Clopper and Pearson's exact bound for as many independent pairs as the grouped ones are worth.
  With `again` it bounds the precision that as many pairs have when they are drawn once more: twice
  the variance, half the pairs.
  """
  size = worth(relevant, returned, squares) / (2 if again else 1)
  hits = size * np.asarray(relevant, float) / np.maximum(returned, 1)
  with np.errstate(invalid="ignore"):
    low = stats.beta.ppf(1 - confidence, hits, size - hits + 1)
  return np.where(hits > 0, np.nan_to_num(low), 0.0)


def worth(relevant, returned, squares):
  """How many independent pairs would tell the precision as well, float64 [L].

  n divided by the design effect, which is the variance of the precision between groups over that of
  independent pairs. With few hits or misses, all pairs of an image's captions count as one.
  """
  n = np.maximum(np.asarray(returned, float), 1)
  p = np.asarray(relevant, float) / n
  r2, rt, t2, captions = squares
  between = np.maximum(r2 - 2 * p * rt + p * p * t2, 0)  # Σ (r − p·t)²
  independent = n * p * (1 - p)
  whole = np.maximum(captions / n, 1)  # design effect if all pairs of an image's captions agree
  effect = np.where(independent >= FEW * whole, between / np.maximum(independent, 1e-12), whole)
  return np.asarray(returned) / np.maximum(effect, 1)
