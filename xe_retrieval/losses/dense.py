"""The paper's equations on a score matrix: the readable reference for streaming.py.

Every function takes unit vectors text, image [n, D], a tuple of ids [n] (rows that share one are
not each other's negatives) and the scalars pair_scores.Live, and gives the loss of the whole batch
as a scalar. With `axis` it runs inside shard_map: a device holds n rows and compares them with
N = devices × n.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores, wide_counts

SIGMOID_BIAS = -10.0  # SigLIP's initial value: at scale 20 the boundary is a cosine of 0.5
HINGE_MARGIN = 0.2  # of cosine; FaceNet's value


def softmax(
  text,
  image,
  ids,
  live,
  scope,
  keep=1.0,
  margin=None,
  correction=0.0,
  corrected_share=1.0,
  axis=None,
):
  """mean_i log(1 + Z_i·exp(−s_ii)), Z_i = Σ exp(s) over the negatives that positive i must beat.

  scope: "query", the negatives of row i (sampled softmax, eq. 2), or "batch", those of all rows
  (cross-example softmax, eq. 5). keep < 1 mines: only this share of them counts, those with the
  highest scores (eq. 3 and 6), rounded up to at least one. margin: see pair_scores.positives.
  correction > 0: s_ij − correction·(r_i + c_j) takes the place of s_ij, for positives as well; r_i
  and c_j are the log-sum-exp of the negatives of row i and of column j, 0 if there are none.
  corrected_share < 1 mixes the loss of these with that of the plain scores.
  """
  scores, negative = _compare(text, image, ids, live.scale, axis)  # [n, N], bool [n, N]
  positive = live.scale * pair_scores.positives(text, image, margin, live.softening)  # [n]
  loss = functools.partial(_softmax, negative=negative, scope=scope, keep=keep, axis=axis)
  if not correction:
    return loss(scores, positive)
  rows = _log_sum_exp(scores, negative)  # [n]
  columns = _log_sum_exp(scores.T, negative.T, axis)  # [N]
  own = collectives.own(columns, axis)  # [n]
  corrected = loss(
    scores - correction * (rows[:, None] + columns), positive - correction * (rows + own)
  )
  if corrected_share == 1:
    return corrected
  return corrected_share * corrected + (1 - corrected_share) * loss(scores, positive)


def _softmax(scores, positive, negative, scope, keep, axis):  # [n, N], [n], bool [n, N] -> []
  weight = negative if keep == 1.0 else _mined(scores, negative, scope, keep, axis)  # [n, N]
  high = jnp.max(lax.stop_gradient(scores), axis=1, where=negative, initial=-jnp.inf)  # [n]
  if scope == "batch":
    high = collectives.largest(jnp.max(high), axis)  # []
  high = jnp.where(jnp.isneginf(high), 0, high)  # no negative at all
  z = weight * jnp.exp(jnp.where(negative, scores - high[..., None], -jnp.inf))  # [n, N]
  z = jnp.sum(z, axis=1)  # [n]
  if scope == "batch":
    z = collectives.total(jnp.sum(z), axis)  # []
  log_z = high + jnp.log(jnp.where(z == 0, 1, z))
  return collectives.mean(jnp.where(z == 0, 0 * positive, jax.nn.softplus(log_z - positive)), axis)


def symmetric(text, image, ids, live, axis=None):
  """CLIP: sampled softmax of texts over images and of images over texts, their mean."""
  over_images = softmax(text, image, ids, live, scope="query", axis=axis)
  over_texts = softmax(image, text, ids, live, scope="query", axis=axis)
  return (over_images + over_texts) / 2


def tcm(text, image, ids, live, weight, positive_margin, negative_margin, axis=None):
  """Sampled softmax and weight × the threshold-consistent margin (Zhang et al. 2024).

  The regulariser is the mean of m⁺ − cos over the positives below m⁺ plus the mean of cos − m⁻ over
  the negatives above m⁻; 0 where there is none.
  """
  scores, negative = _compare(text, image, ids, 1.0, axis)  # cosines
  shortfall = positive_margin - pair_scores.positives(text, image)  # [n]
  excess = scores - negative_margin  # [n, N]
  pull = _mean_over(shortfall, shortfall > 0, axis)
  push = _mean_over(excess, negative & (excess > 0), axis)
  return softmax(text, image, ids, live, scope="query", axis=axis) + weight * (pull + push)


def sigmoid(text, image, ids, live, axis=None):
  """SigLIP: every pair is classified as match or not, Σ −log σ(±(s + bias)) / N."""
  scores, negative = _compare(text, image, ids, live.scale, axis)
  positive = live.scale * pair_scores.positives(text, image)
  pull = jax.nn.softplus(-positive - live.bias)  # [n]
  push = jnp.sum(jax.nn.softplus(scores + live.bias), axis=1, where=negative)  # [n]
  return collectives.mean(pull + push, axis)


def triplet(text, image, ids, live, axis=None):
  """[margin + s_ij − s_ii]₊ over all triplets (text i, its image, a negative image), their mean."""
  scores, negative = _compare(text, image, ids, live.scale, axis)
  positive = live.scale * pair_scores.positives(text, image)
  hinge = jax.nn.relu(live.scale * HINGE_MARGIN + scores - positive[:, None])  # [n, N]
  zero = 0 * collectives.mean(positive, axis)  # keeps a NaN visible when there are no negatives
  return _mean_over(hinge, negative, axis) + zero


def contrastive(text, image, ids, live, axis=None):
  """Mean of scale − s_ii over the pairs plus mean of [s_ij − margin]₊ over the negatives."""
  scores, negative = _compare(text, image, ids, live.scale, axis)
  positive = live.scale * pair_scores.positives(text, image)
  push = jax.nn.relu(scores - live.scale * HINGE_MARGIN)  # [n, N]
  return collectives.mean(live.scale - positive, axis) + _mean_over(push, negative, axis)


def _compare(text, image, ids, scale, axis):
  """Scores of this device's rows against all columns, and the mask of negatives."""
  columns = collectives.gather(image, axis)  # [N, D]
  scores = jnp.matmul(scale * text, columns.T, precision=lax.Precision.HIGHEST)  # [n, N]
  return scores, pair_scores.negatives(ids, tuple(collectives.gather(x, axis) for x in ids))


def _log_sum_exp(scores, negative, axis=None):  # [n, N], bool [n, N] -> [n]
  """Over the negatives of each row, and over the devices of `axis`; 0 if there are none."""
  high = jnp.max(lax.stop_gradient(scores), axis=1, where=negative, initial=-jnp.inf)  # [n]
  high = collectives.largest(high, axis)
  high = jnp.where(jnp.isneginf(high), 0, high)
  z = jnp.exp(jnp.where(negative, scores - high[:, None], -jnp.inf))  # [n, N]
  z = collectives.total(jnp.sum(z, axis=1), axis)
  return high + jnp.log(jnp.where(z == 0, 1, z))


def _mined(scores, negative, scope, keep, axis):
  """Weight of a pair: 1 above the k-th highest negative, 0 below, (k − above) / ties at it."""
  scores = jnp.where(negative, lax.stop_gradient(scores), -jnp.inf)
  pool = scores  # [n, N]
  if scope == "batch":
    n = scores.shape[1]
    if n * n >= 1 << 31:
      raise ValueError(
        f"mining among the {n:,}² pairs of a batch takes implementation='streaming': dense counts "
        "them in 32 bits, enough for 46,340 rows"
      )
    pool = collectives.gather(scores, axis).ravel()[None]  # [1, N²]
  count = jnp.sum(pool > -jnp.inf, axis=1, keepdims=True)
  k = wide_counts.share_of_int(count, keep)
  at = jnp.take_along_axis(-jnp.sort(-pool, axis=1), jnp.maximum(k - 1, 0), axis=1)
  above, ties = (jnp.sum(x, axis=1, keepdims=True) for x in (pool > at, pool == at))
  return jnp.where(scores > at, 1.0, jnp.where(scores == at, (k - above) / ties, 0.0))


def _mean_over(x, where, axis):  # [n, ...], bool [n, ...] -> []
  count = jnp.sum(jnp.sum(where, axis=-1).astype(jnp.float32))  # by row: N² ones overflow int32
  count = jnp.maximum(collectives.total(count, axis), 1)
  return collectives.total(jnp.sum(x, where=where), axis) / count
