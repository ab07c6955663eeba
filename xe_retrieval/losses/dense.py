"""The paper's equations on a score matrix: the readable reference for streaming.py.

Every function takes unit vectors text, image [n, D], a tuple of ids [n] (rows that share one are
not each other's negatives) and the scale, and gives the loss of the whole batch as a scalar. With
`axis` it runs inside shard_map: a device holds n rows and compares them with N = devices × n.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores, wide_counts

SIGMOID_BIAS = (
  -10.0
)  # SigLIP's initial value, kept fixed: at scale 20 the boundary is a cosine of 0.5
HINGE_MARGIN = 0.2  # of cosine; FaceNet's value


def softmax(text, image, ids, scale, scope, keep=1.0, margin=None, axis=None):
  """mean_i log(1 + Z_i·exp(−s_ii)), Z_i = Σ exp(s) over the negatives that positive i must beat.

  scope: "query", the negatives of row i (sampled softmax, eq. 2), or "batch", those of all rows
  (cross-example softmax, eq. 5). keep < 1 mines: only this share of them counts, those with the
  highest scores (eq. 3 and 6), rounded up to at least one. margin: see pair_scores.positives.
  """
  scores, negative = _compare(text, image, ids, scale, axis)  # [n, N], bool [n, N]
  positive = scale * pair_scores.positives(text, image, margin)  # [n]
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


def symmetric(text, image, ids, scale, axis=None):
  """CLIP: sampled softmax of texts over images and of images over texts, their mean."""
  over_images = softmax(text, image, ids, scale, scope="query", axis=axis)
  over_texts = softmax(image, text, ids, scale, scope="query", axis=axis)
  return (over_images + over_texts) / 2


def sigmoid(text, image, ids, scale, axis=None):
  """SigLIP: every pair is classified as match or not, Σ −log σ(±(s + bias)) / N."""
  scores, negative = _compare(text, image, ids, scale, axis)
  positive = scale * pair_scores.positives(text, image)
  pull = jax.nn.softplus(-positive - SIGMOID_BIAS)  # [n]
  push = jnp.sum(jax.nn.softplus(scores + SIGMOID_BIAS), axis=1, where=negative)  # [n]
  return collectives.mean(pull + push, axis)


def triplet(text, image, ids, scale, axis=None):
  """[margin + s_ij − s_ii]₊ over all triplets (text i, its image, a negative image), their mean."""
  scores, negative = _compare(text, image, ids, scale, axis)
  positive = scale * pair_scores.positives(text, image)
  hinge = jax.nn.relu(scale * HINGE_MARGIN + scores - positive[:, None])  # [n, N]
  zero = 0 * collectives.mean(positive, axis)  # keeps a NaN visible when there are no negatives
  return _mean_over(hinge, negative, axis) + zero


def contrastive(text, image, ids, scale, axis=None):
  """Mean of scale − s_ii over the pairs plus mean of [s_ij − margin]₊ over the negatives."""
  scores, negative = _compare(text, image, ids, scale, axis)
  positive = scale * pair_scores.positives(text, image)
  push = jax.nn.relu(scores - scale * HINGE_MARGIN)  # [n, N]
  return collectives.mean(scale - positive, axis) + _mean_over(push, negative, axis)


def _compare(text, image, ids, scale, axis):
  """Scores of this device's rows against all columns, and the mask of negatives."""
  columns = collectives.gather(image, axis)  # [N, D]
  scores = jnp.matmul(scale * text, columns.T, precision=lax.Precision.HIGHEST)  # [n, N]
  return scores, pair_scores.negatives(ids, tuple(collectives.gather(x, axis) for x in ids))


def _mined(scores, negative, scope, keep, axis):
  """Weight of a pair: 1 above the k-th highest negative, 0 below, (k − above) / ties at it."""
  scores = jnp.where(negative, lax.stop_gradient(scores), -jnp.inf)
  pool = scores  # [n, N]
  if scope == "batch":
    pool = collectives.gather(scores, axis).ravel()[None]  # [1, N²]
  count = jnp.sum(pool > -jnp.inf, axis=1, keepdims=True)
  k = wide_counts.share_of_int(count, keep)
  at = jnp.take_along_axis(-jnp.sort(-pool, axis=1), jnp.maximum(k - 1, 0), axis=1)
  above, ties = (jnp.sum(x, axis=1, keepdims=True) for x in (pool > at, pool == at))
  return jnp.where(scores > at, 1.0, jnp.where(scores == at, (k - above) / ties, 0.0))


def _mean_over(x, where, axis):  # [n, N], bool [n, N] -> []
  count = jnp.sum(jnp.sum(where, axis=1).astype(jnp.float32))  # by row: N² ones overflow int32
  count = jnp.maximum(collectives.total(count, axis), 1)
  return collectives.total(jnp.sum(x, where=where), axis) / count
