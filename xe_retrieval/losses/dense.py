"""The paper's equations on a score matrix: short, obvious, the reference for all that is faster.

Every function takes unit vectors text, image [n, D], a tuple of ids [n] (rows that share one are
not each other's negatives) and the scale, and gives the loss of the whole batch as a scalar. With
`axis` it runs inside shard_map: n rows are here, N = devices × n are compared.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import pairs

SIGMOID_BIAS = -10.0  # SigLIP's initial value, held: at scale 20 the boundary lies at cosine 0.5
HINGE_MARGIN = 0.2  # of cosine; FaceNet's value


def softmax(
  text, image, ids, scale, scope, keep=1.0, margin=None, direction="text_to_image", axis=None
):
  """mean_i log(1 + Z_i·exp(−s_ii)), Z_i = Σ exp(s) over the negatives that positive i must beat.

  scope: "query", the negatives of row i (sampled softmax, eq. 2), or "batch", those of all rows
  (cross-example softmax, eq. 5). keep < 1 mines: only this share of them counts, the highest scores
  (eq. 3 and 6); k is rounded up, so at least one is kept. margin: see pairs.positives.
  """
  if direction == "both":
    settings = dict(scale=scale, scope=scope, keep=keep, margin=margin, axis=axis)
    there = softmax(text, image, ids, **settings)
    return (there + softmax(image, text, ids, **settings)) / 2
  if direction == "image_to_text":
    text, image = image, text
  scores, negative = _compare(text, image, ids, scale, axis)  # [n, N], bool [n, N]
  positive = scale * pairs.positives(text, image, margin)  # [n]
  weight = negative if keep == 1.0 else _mined(scores, negative, scope, keep, axis)  # [n, N]

  high = jnp.max(lax.stop_gradient(scores), axis=1, where=negative, initial=-jnp.inf)  # [n]
  if scope == "batch":
    high = pairs.largest(jnp.max(high), axis)  # []
  high = jnp.where(jnp.isneginf(high), 0, high)  # no negative at all
  z = weight * jnp.exp(jnp.where(negative, scores - high[..., None], -jnp.inf))  # [n, N]
  z = jnp.sum(z, axis=1)  # [n]
  if scope == "batch":
    z = pairs.total(jnp.sum(z), axis)  # []
  log_z = high + jnp.log(jnp.where(z == 0, 1, z))
  return pairs.mean(jnp.where(z == 0, 0 * positive, jax.nn.softplus(log_z - positive)), axis)


def sigmoid(text, image, ids, scale, axis=None):
  """SigLIP: every pair by itself is a match or not, −log σ(±(s + bias)), summed, over N."""
  scores, negative = _compare(text, image, ids, scale, axis)
  positive = scale * pairs.positives(text, image)
  pull = jax.nn.softplus(-positive - SIGMOID_BIAS)  # [n]
  push = jnp.sum(jax.nn.softplus(scores + SIGMOID_BIAS), axis=1, where=negative)  # [n]
  return pairs.mean(pull + push, axis)


def triplet(text, image, ids, scale, axis=None):
  """[margin + s_ij − s_ii]₊ over all triplets (text i, its image, a negative image), their mean."""
  scores, negative = _compare(text, image, ids, scale, axis)
  positive = scale * pairs.positives(text, image)
  hinge = jax.nn.relu(scale * HINGE_MARGIN + scores - positive[:, None])  # [n, N]
  nothing = 0 * pairs.mean(positive, axis)  # or NaN, which stays NaN without negatives
  return _mean_over(hinge, negative, axis) + nothing


def contrastive(text, image, ids, scale, axis=None):
  """Mean of scale − s_ii over the pairs plus mean of [s_ij − margin]₊ over the negatives."""
  scores, negative = _compare(text, image, ids, scale, axis)
  positive = scale * pairs.positives(text, image)
  push = jax.nn.relu(scores - scale * HINGE_MARGIN)  # [n, N]
  return pairs.mean(scale - positive, axis) + _mean_over(push, negative, axis)


def _compare(text, image, ids, scale, axis):
  """Scores of the rows here against all columns, and which of them are negatives."""
  columns = pairs.gather(image, axis)  # [N, D]
  scores = jnp.matmul(scale * text, columns.T, precision=lax.Precision.HIGHEST)  # [n, N]
  return scores, pairs.negatives(ids, tuple(pairs.gather(x, axis) for x in ids))


def _mined(scores, negative, scope, keep, axis):
  """Weight of a pair: 1 above the k-th highest negative, a share of the rest at it, 0 below."""
  p, q = pairs.share(keep)
  scores = jnp.where(negative, lax.stop_gradient(scores), -jnp.inf)
  pool = (
    pairs.gather(scores, axis).ravel()[None] if scope == "batch" else scores
  )  # [1, N²] | [n, N]
  count = jnp.sum(pool > -jnp.inf, axis=1, keepdims=True)
  k = count // q * p + -(-(count % q * p) // q)  # ⌈count·p/q⌉ without overflow
  at = jnp.take_along_axis(-jnp.sort(-pool, axis=1), jnp.maximum(k - 1, 0), axis=1)
  above, ties = (jnp.sum(x, axis=1, keepdims=True) for x in (pool > at, pool == at))
  return jnp.where(scores > at, 1.0, jnp.where(scores == at, (k - above) / ties, 0.0))


def _mean_over(x, where, axis):  # [n, N], bool [n, N] -> []
  count = jnp.sum(jnp.sum(where, axis=1).astype(jnp.float32))  # by row: N² ones overflow int32
  return pairs.total(jnp.sum(x, where=where), axis) / jnp.maximum(pairs.total(count, axis), 1)
