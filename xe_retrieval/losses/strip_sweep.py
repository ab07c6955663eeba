"""One pass over the strips of the score matrix that sums the gradients of a weight per pair."""

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores


def sweep(weigh, state, x, y, level, ids, axis):
  """Goes over the strips of the matrix; sums the gradients of Σ W_ij·s_ij.

  weigh(state, scores [R, N], level) -> state, weight [R, N], factor [R], decay [], rows
  scores are −inf where a pair is not a negative. level is a tree of [n, …] of which weigh sees the
  strip's [R, …]. W_ij = factor_i·weight_ij; decay rescales the sums of earlier strips. rows is a
  tree of [R, …] and is returned as one of [n, …].
  Returns state, dx [n, D] (without later decays), dy [N, D] (of this device's rows), rows.
  """
  columns, column_ids = collectives.gather((y, ids), axis)
  (x, ids, level), real = pair_scores.strips((x, ids, level), len(columns))

  def step(carry, strip):
    state, dy = carry
    (x, ids, level), real = strip
    scores = pair_scores.scores(x, columns, ids, column_ids, real)
    state, weight, factor, decay, rows = weigh(state, scores, level)
    dx = pair_scores.matmul(weight, columns) * factor[:, None]  # [R, D]
    dy = dy * decay + pair_scores.matmul((x * factor[:, None]).T, weight)  # [D, N]
    return (state, dy), (dx, rows)

  carry = collectives.varying((state, jnp.zeros(columns.T.shape)), axis)
  (state, dy), (dx, rows) = lax.scan(step, carry, ((x, ids, level), real))
  dx, rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(y)], (dx, rows))
  return state, dx, dy.T, rows
