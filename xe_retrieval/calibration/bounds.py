"""A lower confidence bound of a precision whose pairs come in groups."""

import numpy as np
from scipy import stats

FEW = 5  # expected hits or misses below which the spread between groups is not trusted


def precision(relevant, returned, squares, confidence, again=False):
  """int [L], int [L], float [3, L] Σ r², Σ r·t, Σ t² over groups -> float64 [L]; 0: nothing known.

  Clopper and Pearson's exact bound for as many independent pairs as the grouped ones are worth: n
  divided by the design effect, which is the variance of the precision between groups over that of
  independent pairs. With few hits or misses the groups count as if each were one pair. With
  `again` it bounds the precision that as many pairs have when they are drawn once more: twice the
  variance, half the pairs.
  """
  relevant, returned = np.asarray(relevant, float), np.asarray(returned, float)
  n = np.maximum(returned, 1)
  p = relevant / n
  r2, rt, t2 = squares
  between = np.maximum(r2 - 2 * p * rt + p * p * t2, 0)  # Σ (r − p·t)²
  independent = n * p * (1 - p)
  whole = np.maximum(t2 / n, 1)  # design effect if all pairs of a group agree
  effect = np.where(independent >= FEW * whole, between / np.maximum(independent, 1e-12), whole)
  size = n / np.maximum(effect, 1) / (2 if again else 1)
  hits = p * size
  with np.errstate(invalid="ignore"):
    low = stats.beta.ppf(1 - confidence, hits, size - hits + 1)
  return np.where((returned > 0) & (hits > 0), np.nan_to_num(low), 0.0)
