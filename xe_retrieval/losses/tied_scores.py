"""What mining selected, and the weights of scores that are tied at its threshold.

The threshold is the k-th largest score as the search (selection.py) computed it. The sweep of the
loss computes every score again in another compiled product, and nothing promises that this one
rounds in the same way: GPUs choose kernels by timing, TPUs by layout. So nothing here depends on
it. As a rule hardly any score is within rounding of the threshold, and Z is right to its last
digits whichever side these fall on. Where many are (a collapsed model, duplicates), scores within
rounding count as tied; the sweep sums them separately and weighs them at its end by its own counts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores, wide_counts

TIED = 1e-6  # share of the k scores from which on ties are summed separately
ROUNDING = 2.0**-20  # of the largest score possible: by how much two products of a pair may differ


class Mined(NamedTuple):
  """Selects k scores: weight 1 above `score`, `weight` for those equal to it."""

  score: jax.Array  # [] the k-th largest; NaN if the search did not find it
  weight: jax.Array  # [] (k − above) / equal
  k: jax.Array  # [2]
  above: jax.Array  # [2]
  equal: jax.Array  # [2]
  tied: jax.Array  # bool []: many are equal
  margin: jax.Array  # []: scores within it of `score` are ties; 0 unless tied

  def weights(self, scores):
    """Of the same shape; 0 for ties that the sweep sums separately."""
    tie = jnp.where(self.tied, 0.0, self.weight)
    above, ties = self._compare(scores)
    return jnp.where(above, 1.0, jnp.where(ties, tie, 0.0))

  def _compare(self, scores):
    above = scores > self.score + self.margin
    return above, ~above & (scores >= self.score - self.margin)


class Ties(NamedTuple):
  """Sums over the ties of a sweep, of exp(score − mined.score) and its products."""

  counts: jax.Array  # int32 [2, N]: scores above the ties, ties
  z: jax.Array  # [N]
  dy: jax.Array  # [D, N]


def none(columns):  # [N, D] -> Ties
  n = len(columns)
  return Ties(jnp.zeros((2, n), jnp.int32), jnp.zeros(n), jnp.zeros(columns.T.shape))


def add(mined, ties, scores, x, columns, axis):  # …, [R, N], [R, D], [N, D] -> Ties, dx [R, D]
  """Adds the ties of a strip, if many are tied."""

  def separately():
    above, tied = mined._compare(scores)
    weight = jnp.where(tied, jnp.exp(scores - mined.score), 0)  # [R, N]
    sums = Ties(
      ties.counts + two_counts(above, tied, axis=0),
      ties.z + jnp.sum(weight, axis=0),
      ties.dy + pair_scores.matmul(x.T, weight),
    )
    return sums, pair_scores.matmul(weight, columns)

  nothing = collectives.varying(jnp.zeros(x.shape), axis)
  return lax.cond(mined.tied, separately, lambda: (ties, nothing))


def factor(mined, counts, top, axis):  # Mined, int32 [2, N] of a whole sweep, [] -> []
  """What turns the sums of Ties into those of exp(score − top): weighed so that k are selected."""
  above, ties = wide_counts.count(counts[0], axis), wide_counts.count(counts[1], axis)
  missing = wide_counts.to_float(wide_counts.carry(mined.k - above))
  weight = jnp.clip(missing / jnp.maximum(wide_counts.to_float(ties), 1), 0, 1)
  return jnp.where(mined.tied, weight * jnp.exp(jnp.minimum(mined.score - top, 0)), 0)


def two_counts(a, b, axis):  # bool, bool -> int32 [2, ...]
  """The sums of a and b in one pass, packed into one int32: for strips of less than 2¹⁵ rows."""
  bits = a.shape[axis].bit_length()
  both = jnp.sum(a + (b.astype(jnp.int32) << bits), axis=axis)
  return jnp.stack([both & ((1 << bits) - 1), both >> bits])
