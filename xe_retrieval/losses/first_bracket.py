"""A first bracket for selection.py: two scores that very likely enclose the k-th largest.

Exactness does not depend on it: a bracket that misses only costs another pass. So its constants
trade the chance of a miss against the width of the bracket, in standard deviations.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores, wide_counts

SAMPLE = 64  # scores per row in the sample; 64 N of N² scores, so that its memory is linear in N
HALVINGS = 14  # 2⁻¹⁴ of the sample's range is less than the bracket's width up to a million rows


def first_bracket(x, ids, matrix, keep, k, negatives):  # [n, D], tuple of [n], … -> int32, int32
  """(low, high) as integers of wide_counts.to_int."""
  axis = matrix.axis
  sample = _sample(x, ids, matrix)
  size = collectives.total(jnp.sum(sample > -jnp.inf), axis).astype(jnp.float32)
  # The k-th largest has a rank in the sample with standard deviation √(keep·(1 − keep)·size): low
  # and high lie four of these (and two ranks, for tiny samples) below and above rank keep·size.
  error = 4 * jnp.sqrt(keep * (1 - keep) * size) + 2
  top = collectives.largest(jnp.max(sample), axis)
  bottom = -collectives.largest(jnp.max(jnp.where(sample > -jnp.inf, -sample, -jnp.inf)), axis)
  low = _quantile(sample, keep * size + error, bottom, top, axis)[0]
  high = _quantile(sample, keep * size - error, bottom, top, axis)[1]

  # One exact count at the middle gives the number of ranks missing to k. A step of that many ranks,
  # at the spacing of scores in the bracket, leads to the k-th largest, up to three errors:
  # - The spacing is estimated from the 2·error scores of the sample in the bracket, hence wrong by
  #   1/√(2·error): 2.2% at N = 4,096, keep = 0.5, less in larger batches. 0.07 is three times that.
  # - The number of scores in the step varies by √missing; three times that.
  # - 16 ranks in any case, so that rounding cannot close the bracket when little is missing.
  middle = low + (high - low) / 2
  missing = matrix.count(lambda strip: matrix.scores(strip) >= middle) - k
  missing = wide_counts.to_float(wide_counts.carry(missing))
  expected = error * wide_counts.to_float(negatives) / jnp.maximum(size, 1)  # ranks, low to middle
  spacing = (high - low) / 2 / jnp.maximum(expected, 1)
  middle += missing * spacing
  error = (0.07 * jnp.abs(missing) + 3 * jnp.sqrt(jnp.abs(missing)) + 16) * spacing
  # More missing than the bracket should hold: scores are clustered or tied and have no density.
  smooth = jnp.abs(missing) < expected
  low, high = jnp.where(smooth, middle - error, low), jnp.where(smooth, middle + error, high)
  return wide_counts.to_int(low), wide_counts.to_int(high)


def _sample(x, ids, matrix):  # -> [blocks, width, width], −inf where not a negative
  """Scores of each block of rows with columns of its own, spread over the batch."""
  n = len(matrix.y)
  width = min(SAMPLE, len(x))
  blocks = len(x) // width
  first = 0 if matrix.axis is None else lax.axis_index(matrix.axis) * blocks
  chosen = (first + jnp.arange(blocks)[:, None] + jnp.arange(width) * (n // width)) % n

  def cut(a):  # [n, ...] -> [blocks, width, ...]
    return a[: blocks * width].reshape(blocks, width, *a.shape[1:])

  x, ids = jax.tree.map(cut, (x, ids))
  y, column_ids = jax.tree.map(lambda a: a[chosen], (matrix.y, matrix.ids))
  return jax.vmap(pair_scores.scores)(x, y, ids, column_ids)


def _quantile(sample, rank, bottom, top, axis):
  """Bisects [bottom, top] for the score of this rank in the sample of all devices."""

  def halve(_, bracket):
    low, high = bracket
    middle = low + (high - low) / 2
    enough = collectives.total(jnp.sum(sample >= middle), axis) >= rank
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  return lax.fori_loop(0, HALVINGS, halve, (bottom, top))
