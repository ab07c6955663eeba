"""The losses of dense.py without the score matrix: O(N·D) memory, 6N²D operations, exact gradients.

Let s = x·yᵀ be the scores, x = scale × text, y = image. Every loss compares the negatives of the
matrix with one level per row (as a rule the positive score) and its gradient is a weight per pair:

  dx = W·y,  dyᵀ = xᵀ·W,  W_ij = ∂loss/∂s_ij.

W is computed strip by strip (a few rows, all columns) from the strip's own scores and dropped, so
both gradients are complete at the end of the sweep that computes the value, and the backward pass
only multiplies them by the incoming scalar. That works because each W_ij is known up to a factor:

  sigmoid, hinge   from the score alone: W_ij = f'(s_ij − level_i)
  softmax, query   from its row: W_ij = σ(log Z_i − level_i) · exp(s_ij) / Z_i
  softmax, batch   up to one factor for the matrix: W_ij = exp(s_ij) · Σ_i σ(log Z − level_i) / Z;
                   sums of exp(s_ij − highest score so far) are rescaled once at the end

Nothing is recomputed and nothing of size N² exists. With `axis` a device sweeps its own rows over
the gathered columns; its share of dy is summed and scattered back. (Passing columns around a ring
instead would save only a third of the memory, 56 of 177 MiB at N = 65,536, D = 128 on 8 devices:
most of it is strips of scores. See python -m benchmarks.losses --only=devices.) Mining
(keep < 1) first finds the k-th largest score: see selection.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores, selection
from xe_retrieval.losses.dense import HINGE_MARGIN, SIGMOID_BIAS


def softmax(text, image, ids, scale, scope, keep=1.0, margin=None, axis=None):
  """As dense.softmax."""
  positive = scale * pair_scores.positives(text, image, margin)
  sweep = {"query": _query, "batch": _batch}[scope]
  return _loss(functools.partial(sweep, keep=keep, axis=axis), scale * text, image, positive, ids)


def symmetric(text, image, ids, scale, axis=None):
  """As dense.symmetric."""
  over_images = softmax(text, image, ids, scale, scope="query", axis=axis)
  over_texts = softmax(image, text, ids, scale, scope="query", axis=axis)
  return (over_images + over_texts) / 2


def sigmoid(text, image, ids, scale, axis=None):
  """As dense.sigmoid."""
  positive = scale * pair_scores.positives(text, image)
  pull = collectives.mean(jax.nn.softplus(-positive - SIGMOID_BIAS), axis)
  level = jnp.full_like(positive, -SIGMOID_BIAS)
  return pull + _loss(functools.partial(_sigmoid, axis=axis), scale * text, image, level, ids)


def triplet(text, image, ids, scale, axis=None):
  """As dense.triplet."""
  level = scale * (pair_scores.positives(text, image) - HINGE_MARGIN)
  return _loss(functools.partial(_hinge, axis=axis), scale * text, image, level, ids)


def contrastive(text, image, ids, scale, axis=None):
  """As dense.contrastive."""
  positive = scale * pair_scores.positives(text, image)
  pull = collectives.mean(scale - positive, axis)
  level = jnp.full_like(positive, scale * HINGE_MARGIN)
  return pull + _loss(functools.partial(_hinge, axis=axis), scale * text, image, level, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(sweep, x, y, level, ids):  # [n, D], [n, D], [n], tuple of [n] -> []
  return sweep(x, y, level, ids)[0]


def _backward(sweep, gradients, g):
  return *(g * gradient for gradient in gradients), None


_loss.defvjp(lambda sweep, *arguments: sweep(*arguments), _backward)


def _query(x, y, level, ids, keep, axis):
  """mean_i log(1 + Z_i·exp(−level_i)), Z_i over the negatives of row i; and its gradients."""

  def weigh(state, scores, level):
    high = jnp.max(scores, axis=1)  # [R]
    high = jnp.where(jnp.isneginf(high), 0, high)
    weight = jnp.exp(scores - high[:, None])  # [R, N]
    if keep < 1:
      weight *= selection.weights(scores, *selection.kth_largest_of_rows(scores, keep))
    z = jnp.sum(weight, axis=1)  # [R]
    excess = high + jnp.log(z) - level
    slope = jax.nn.sigmoid(excess)
    return state, weight, slope / jnp.where(z == 0, 1, z), 1, (jax.nn.softplus(excess), slope)

  _, dx, dy, (value, slope) = _sweep(weigh, (), x, y, level, ids, axis)
  n = collectives.total(len(x), axis)
  return collectives.mean(value, axis), (dx / n, collectives.scatter(dy, axis) / n, -slope / n)


def _batch(x, y, level, ids, keep, axis):
  """mean_i log(1 + Z·exp(−level_i)), Z over the negatives of the whole batch; and its gradients."""
  mined = selection.kth_largest(x, y, ids, keep, axis) if keep < 1 else None

  def weigh(state, scores, level):
    high, z, selected = state
    higher = jnp.maximum(high, jnp.max(scores))
    decay = jnp.exp(high - higher)
    weight = jnp.exp(scores - higher)  # [R, N]
    if mined:
      weight *= selection.weights(scores, mined.score, mined.weight)
      selected += selection.selected(scores, mined.score)
    z = z * decay + jnp.sum(weight, axis=0)  # [N]: one sum of N² terms would lose digits
    state = (higher, z, selected)
    return state, weight, jnp.ones_like(level), decay, jnp.full_like(level, higher)

  columns = collectives.total(len(y), axis)
  state = (jnp.float32(-1e38), jnp.zeros(columns), jnp.zeros((2, columns), jnp.int32))
  (high, z, selected), dx, dy, highs = _sweep(weigh, state, x, y, level, ids, axis)
  top = collectives.largest(high, axis)
  z = collectives.total(jnp.sum(z) * jnp.exp(high - top), axis)
  if mined:  # selection and sweep must have seen bit-identical scores
    z = jnp.where(selection.agrees(mined, selected, axis), z, jnp.nan)
  excess = top + jnp.log(z) - level  # [n]
  slope = jax.nn.sigmoid(excess) / collectives.total(len(x), axis)
  factor = collectives.total(jnp.sum(slope), axis) / jnp.where(z == 0, 1, z)
  dx *= (factor * jnp.exp(highs - top))[:, None]
  dy = collectives.scatter(dy * (factor * jnp.exp(high - top)), axis)
  return collectives.mean(jax.nn.softplus(excess), axis), (dx, dy, -slope)


def _sigmoid(x, y, level, ids, axis):
  """mean_i Σ_j log(1 + exp(s_ij − level_i)) over the negatives; and its gradients."""

  def weigh(state, scores, level):
    excess = scores - level[:, None]  # [R, N]
    value = jnp.sum(jax.nn.softplus(excess), axis=1)
    weight = jax.nn.sigmoid(excess)
    return state, weight, jnp.ones_like(level), 1, (value, jnp.sum(weight, axis=1))

  _, dx, dy, (value, slope) = _sweep(weigh, (), x, y, level, ids, axis)
  n = collectives.total(len(x), axis)
  return collectives.mean(value, axis), (dx / n, collectives.scatter(dy, axis) / n, -slope / n)


def _hinge(x, y, level, ids, axis):
  """Mean over the negatives of [s_ij − level_i]₊; and its gradients."""

  def weigh(state, scores, level):
    excess = scores - level[:, None]  # [R, N]
    weight = (excess > 0).astype(jnp.float32)
    value = jnp.sum(jax.nn.relu(excess), axis=1)
    count = jnp.sum(~jnp.isneginf(scores), axis=1, dtype=jnp.float32)
    return state, weight, jnp.ones_like(level), 1, (value, jnp.sum(weight, axis=1), count)

  _, dx, dy, (value, slope, count) = _sweep(weigh, (), x, y, level, ids, axis)
  n = jnp.maximum(collectives.total(jnp.sum(count), axis), 1)
  # 0 * level keeps a NaN visible when there are no negatives.
  value = collectives.total(jnp.sum(value + 0 * level), axis) / n
  return value, (dx / n, collectives.scatter(dy, axis) / n, -slope / n)


def _sweep(weigh, state, x, y, level, ids, axis):
  """Goes over the strips of the matrix; sums the gradients of Σ W_ij·s_ij.

  weigh(state, scores [R, N], level [R]) -> state, weight [R, N], factor [R], decay [], rows
  scores are −inf where a pair is not a negative. W_ij = factor_i·weight_ij; decay rescales the sums
  of earlier strips. rows is a tree of [R] and is returned as one of [n].
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
