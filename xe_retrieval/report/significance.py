"""Is one loss better than another, or is the difference noise?

Over seeds: Welch's t-test. Over queries: runs that answered the same queries are compared query by
query with an exact sign-flip test, corrected by Holm's method for all pairs of losses.
"""

import itertools

import numpy as np
from scipy import signal, stats

LEVEL = 0.05
SMALLEST = 1e-12  # of the p values that are computed: below it are rounding errors of the FFT


def paired(groups):
  """{label: [Run]} -> {(label, label): p of equal Recall@1}, corrected; {} without query ranks."""
  if not all("query_ranks" in run.curves for runs in groups.values() for run in runs):
    return {}
  pairs = list(itertools.combinations(groups, 2))
  p = holm([sign_flip(differences(groups[a], groups[b])) for a, b in pairs])
  return {key: float(x) for (a, b), x in zip(pairs, p, strict=True) for key in ((a, b), (b, a))}


def differences(a, b):
  """[Run], [Run] -> int [images]: by how much `a` answers an image's captions more often than `b`.

  Means over seeds, multiplied by both numbers of seeds to keep them whole. Captions of one image
  are not independent and count as one; without `query_image` each query is by itself.
  """
  by_query = len(b) * _hits(a).sum(axis=0) - len(a) * _hits(b).sum(axis=0)  # [Q]
  group = a[0].curves.get("query_image", np.arange(len(by_query)))
  by_image = np.zeros(group.max() + 1, np.int64)
  np.add.at(by_image, group, by_query)
  return by_image


def sign_flip(values):
  """int [n] -> two-sided p of their sum, if either sign of each value were equally likely.

  Exact; McNemar's test if the values are −1, 0 and 1.
  """
  values = values[values != 0]
  if not values.size:
    return 1.0
  values = values // np.gcd.reduce(values)
  chance = np.ones(1)  # of each sum of the values with a positive sign
  for size, count in zip(*np.unique(np.abs(values), return_counts=True), strict=True):
    part = np.zeros(size * count + 1)
    part[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
    chance = signal.fftconvolve(chance, part) if len(chance) > 1 else part
  total = len(chance) - 1
  sums = 2 * np.arange(total + 1) - total
  return float(np.clip(chance[np.abs(sums) >= abs(values.sum())].sum(), SMALLEST, 1))


def holm(p):
  """p values of several tests -> p values that hold for all of them together."""
  p = np.asarray(p, float)
  order = np.argsort(p, kind="stable")
  out = np.empty(len(p))
  out[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
  return np.minimum(out, 1)


def over_seeds(a, b):
  """Figures of several seeds each -> p of equal means."""
  if np.ptp(a) == np.ptp(b) == 0:
    return float(np.mean(a) == np.mean(b))
  return float(stats.ttest_ind(a, b, equal_var=False).pvalue)


def _hits(runs):
  """[Run] -> int [seeds, Q]: whether the right image is first."""
  return np.stack([run.curves["query_ranks"] == 0 for run in runs]).astype(np.int64)
