"""Score → log-odds that the image is relevant to the query: monotone in the score, query by query.

The same score means more from a precise query than from a vague one, and more from one that many
images answer. So queries are grouped by how they score against the bank's images, by the mean and
the standard deviation (a vague query scores alike everywhere, a precise one high against few), and
by their familiarity: what many captions say is true of many images. Each group has a rising
piecewise-linear function from score to log-odds, fitted to counts of all its pairs; how many groups
there are, held-out queries decide.

    z(s, x) = curve of x's group at s + log π(x)

π is the query's familiarity: 1 but for queries unlike the captions that the model knows. z holds
for the gallery it was fitted on; `Counts.shift` carries it to other sizes.
"""

import dataclasses

import numpy as np
from scipy import optimize
from threadpoolctl import threadpool_limits

CELL = 0.0025  # scores are counted in cells of this width
LIMIT = 2  # between −LIMIT and LIMIT: cosines, and what a bank makes of them
CELLS = int(2 * LIMIT / CELL)
MIDDLES = CELL * (np.arange(CELLS) + 0.5) - LIMIT
DEPTH = 6  # up to 2⁶ groups
GAP = 1e-5  # between the values of queries of two groups, at least
FEWEST = 20  # queries of a group, in the mean
KNOTS = (2, 15, 35, 50, 65, 80, 95)  # where a curve may bend: percentiles of its scores
SLOPES = (0.5, 300.0)  # logits per unit of score: strictly rising, so that it can be inverted
SMOOTH = 1e-3  # on the squared change of slope between segments
RARE = 0.01  # share of held-out captions whose familiarity is held against them
# log π of a query less familiar than every held-out caption: no score makes up for it, though the
# steepest curve rises by 600 between the ends of what scores can be.
UNFAMILIAR = -1e4


@dataclasses.dataclass(frozen=True)
class Queries:
  """What the calibrator knows of queries beside their scores."""

  level: np.ndarray  # float64 [Q]: mean of their scores against the bank's images
  spread: np.ndarray  # float64 [Q]: and the standard deviation
  familiarity: np.ndarray  # float64 [Q]: see bank.Bank

  def __len__(self):
    return len(self.level)

  def known(self, depth: int):
    """By what the tree of groups splits at this depth, float64 [Q]."""
    return (self.spread, self.familiarity, self.level)[depth % 3]

  def __getitem__(self, rows):
    return Queries(self.level[rows], self.spread[rows], self.familiarity[rows])


@dataclasses.dataclass(frozen=True)
class Calibrator:
  cuts: np.ndarray  # float64 [groups − 1]: a binary tree of medians, level by level
  curves: list[tuple[np.ndarray, np.ndarray]]  # [groups] of knots (scores) and values (log-odds)
  familiar: np.ndarray  # float64 [F], rising: quantiles 0 … RARE of held-out captions' familiarity

  def logit(self, scores, queries: Queries):
    """float [Q, k] -> float64 [Q, k]."""
    out = np.empty(scores.shape)
    for group, rows in self._groups(queries):
      out[rows] = np.interp(scores[rows], *_prolonged(*self.curves[group]))
    return out + self.log_familiar(queries.familiarity)[:, None]

  def score(self, logits, queries: Queries):
    """The inverse: which score a query needs for each logit [L] -> float64 [Q, L]."""
    wanted = np.asarray(logits)[None, :] - self.log_familiar(queries.familiarity)[:, None]
    out = np.empty(wanted.shape)
    for group, rows in self._groups(queries):
      knots, values = _prolonged(*self.curves[group])
      out[rows] = np.interp(wanted[rows], values, knots)
    return out

  def log_familiar(self, familiarity):
    """log π: the query's place among the rarest held-out captions; [Q] -> float64 [Q]."""
    if not len(self.familiar):
      return np.zeros(len(familiarity))
    place = np.interp(familiarity, self.familiar, np.linspace(0, 1, len(self.familiar)))
    return np.where(place > 0, np.log(np.maximum(place, 1e-12)), UNFAMILIAR)

  def _groups(self, queries):
    group = assign(self.cuts, queries)
    return [(g, np.flatnonzero(group == g)) for g in np.unique(group)]

  def to_dict(self):
    curves = [{"score": k.tolist(), "logit": v.tolist()} for k, v in self.curves]
    return {"cuts": self.cuts.tolist(), "curves": curves, "familiar": self.familiar.tolist()}

  @classmethod
  def from_dict(cls, fields):
    curves = [
      (np.asarray(c["score"], float), np.asarray(c["logit"], float)) for c in fields["curves"]
    ]
    cuts = np.asarray(fields["cuts"], float)
    if len(curves) != len(cuts) + 1:
      raise ValueError(f"{len(curves)} curves for {len(cuts) + 1} groups")
    for knots, values in curves:
      if knots.shape != values.shape or len(knots) < 2:
        raise ValueError("a curve's columns differ in length")
      if (np.diff(knots) <= 0).any() or (np.diff(values) <= 0).any():
        raise ValueError("a curve does not rise with the score")
    return cls(cuts, curves, np.asarray(fields["familiar"], float))


def grow(queries: Queries, depth: int = DEPTH):
  """The cuts of a tree that halves the queries by spread, familiarity, level, spread, …"""
  cuts, groups = [], [np.arange(len(queries))]
  alike = not any(np.ptp(queries.known(at)) for at in range(3))
  depth = 0 if alike else min(depth, max(len(queries) // FEWEST, 1).bit_length() - 1)
  for at in range(depth):
    values = queries.known(at)
    halves = []
    for rows in groups:
      cut = _between(values[rows])
      cuts.append(cut)
      halves += [rows[values[rows] <= cut], rows[values[rows] > cut]]
    groups = halves
  return np.array(cuts)


def _between(values):
  """The middle of the gap nearest above the median: no query may lie on a cut.

  A caption that is there often would be the median itself, and the last bits of its vector, which
  depend on the batch, would decide about its group.
  """
  values = np.sort(values)
  gaps = np.flatnonzero(np.diff(values) > GAP)
  if not gaps.size:
    return float(values[-1]) + 1 if len(values) else 0.0
  at = gaps[min(np.searchsorted(gaps, (len(values) - 1) // 2), len(gaps) - 1)]
  return float(values[at] + values[at + 1]) / 2


def assign(cuts, queries: Queries):
  """int [Q]: the group of each query, 0 … len(cuts)."""
  depth = (len(cuts) + 1).bit_length() - 1
  group = np.zeros(len(queries), np.int64)
  for at in range(depth):
    values = queries.known(at)
    group = 2 * group + (values > cuts[2**at - 1 + group])
  return group


@threadpool_limits.wrap(limits=1, user_api="blas")  # its problems are tiny: threads only wait
def fit(cuts, histograms, queries: Queries, rare=RARE) -> tuple[Calibrator, list[Calibrator]]:
  """Counts of pairs -> the calibrator with the best log-likelihood on held-out queries.

  `histograms` is int [2, groups, 2, CELLS]: halves of the queries, groups of `cuts`, relevant and
  irrelevant pairs, cells of the score. Also gives, for each half, the calibrator of the *other*
  half: what is counted with it is not what it was fitted on. `rare` is the share of the queries
  whose familiarity is held against them.
  """
  deepest = (len(cuts) + 1).bit_length() - 1
  depths = range(deepest + 1)
  merged = {d: histograms.reshape(2, 2**d, -1, 2, CELLS).sum(axis=2) for d in depths}
  others = {d: [_curves(h[1]), _curves(h[0])] for d, h in merged.items()}
  likelihood = {d: sum(map(_log_likelihood, others[d], merged[d])) for d in depths}
  depth = max(likelihood, key=likelihood.get)
  known = rare and np.ptp(queries.familiarity)
  least = np.quantile(queries.familiarity, np.linspace(0, rare, 21)) if known else np.array([])
  make = lambda curves: Calibrator(cuts[: 2**depth - 1], curves, least)  # noqa: E731
  return make(_curves(merged[depth].sum(axis=0))), [make(curves) for curves in others[depth]]


def _curves(histograms):
  """int [groups, 2, CELLS] -> a curve for each group; without any pairs, that of all."""
  everything = _curve(*histograms.sum(axis=0))
  return [_curve(*h) if h.any() else everything for h in histograms]


def _curve(relevant, irrelevant):
  """Monotone piecewise-linear logistic regression on counted scores -> knots, values."""
  right, wrong = relevant.sum(), irrelevant.sum()
  place = np.cumsum(relevant / max(right, 1) + irrelevant / max(wrong, 1))
  knots = np.interp(np.array(KNOTS) / 100 * place[-1], place, MIDDLES)
  knots = knots[np.concatenate([[True], np.diff(knots) > 4 * CELL])]
  if len(knots) < 2:
    knots = np.array([knots[0] - 0.05, knots[0] + 0.05])
  used = relevant + irrelevant > 0
  x = np.concatenate([_segments(MIDDLES[used], knots), np.ones((used.sum(), 1))], axis=1)
  # Half a pair of each kind at the ends: the odds stay finite where one kind is missing.
  r, n = relevant[used].astype(float), (relevant + irrelevant)[used].astype(float)
  r[-1] += 0.5
  n[[0, -1]] += 0.5
  segments, scale = len(knots) - 1, right + 1  # relevant pairs are rare and tolerances absolute

  def objective(b):
    z = x @ b
    change = np.diff(b[:segments])
    gradient = x.T @ (n * 0.5 * (1 + np.tanh(z / 2)) - r)
    gradient[: segments - 1] -= 2 * SMOOTH * change
    gradient[1:segments] += 2 * SMOOTH * change
    loss = n @ np.logaddexp(0, z) - r @ z + SMOOTH * change @ change
    return loss / scale, gradient / scale

  start = np.concatenate([np.full(segments, 10.0), [np.log((right + 0.5) / (wrong + 0.5)) - 1]])
  bounds = [SLOPES] * segments + [(None, None)]
  limits = {"maxiter": 1000, "ftol": 1e-10}
  b = optimize.minimize(
    objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=limits
  ).x
  return knots, b[-1] + np.concatenate([[0], np.cumsum(b[:segments] * np.diff(knots))])


def _segments(t, knots):
  """[P] -> [P, K − 1]: how much of each segment lies below t, the outer ones open."""
  low, high = knots[:-1], knots[1:]
  parts = np.minimum(t[:, None], high) - low
  parts[:, 1:] = np.maximum(parts[:, 1:], 0)
  parts[:, -1] += np.maximum(t - high[-1], 0)
  return parts


def _prolonged(knots, values, far=1e3):
  """A curve with its outer segments prolonged far beyond any score."""
  slopes = np.diff(values) / np.diff(knots)
  ends = values[0] - far * slopes[0], values[-1] + far * slopes[-1]
  return (
    np.concatenate([[knots[0] - far], knots, [knots[-1] + far]]),
    np.concatenate([[ends[0]], values, [ends[1]]]),
  )


def _log_likelihood(curves, histograms):
  total = 0.0
  for (knots, values), (relevant, irrelevant) in zip(curves, histograms, strict=True):
    z = np.interp(MIDDLES, *_prolonged(knots, values))
    total -= (relevant + irrelevant) @ np.logaddexp(0, z) - relevant @ z
  return total
