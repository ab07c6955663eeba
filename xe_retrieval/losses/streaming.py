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
(keep < 1) first finds the k-th largest score: see selection.py; scores tied with it are weighed by
the sweep's own counts: see tied_scores.py. Corrected scores take one more sweep: see corrected.py.
"""

import functools

import jax
import jax.numpy as jnp

from xe_retrieval.losses import collectives, corrected, pair_scores, selection, tied_scores
from xe_retrieval.losses.dense import HINGE_MARGIN
from xe_retrieval.losses.strip_sweep import sweep


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
  """As dense.softmax."""
  x = live.scale * text
  positive = live.scale * pair_scores.positives(text, image, margin, live.softening)
  if correction and scope == "batch" and keep == 1.0:
    settings = dict(correction=correction, share=corrected_share, axis=axis)
    return _loss(functools.partial(corrected.batch, **settings), x, image, positive, ids)
  differentiate = {"query": _query, "batch": _batch}[scope]
  loss = functools.partial(_loss, functools.partial(differentiate, keep=keep, axis=axis))
  if not correction:
    return loss(x, image, positive, ids)
  value = corrected_share * loss(*corrected.pairs(x, image, positive, ids, correction, axis), ids)
  if corrected_share == 1:
    return value
  return value + (1 - corrected_share) * loss(x, image, positive, ids)


def symmetric(text, image, ids, live, axis=None):
  """As dense.symmetric."""
  over_images = softmax(text, image, ids, live, scope="query", axis=axis)
  over_texts = softmax(image, text, ids, live, scope="query", axis=axis)
  return (over_images + over_texts) / 2


def tcm(text, image, ids, live, weight, positive_margin, negative_margin, axis=None):
  """As dense.tcm."""
  shortfall = jax.nn.relu(positive_margin - pair_scores.positives(text, image))  # [n]
  count = collectives.total(jnp.sum(shortfall > 0), axis)
  pull = collectives.total(jnp.sum(shortfall), axis) / jnp.maximum(count, 1)
  level = jnp.full_like(shortfall, negative_margin)
  push = _loss(functools.partial(_hinge, over="violations", axis=axis), text, image, level, ids)
  return softmax(text, image, ids, live, scope="query", axis=axis) + weight * (pull + push)


def sigmoid(text, image, ids, live, axis=None):
  """As dense.sigmoid."""
  positive = live.scale * pair_scores.positives(text, image)
  pull = collectives.mean(jax.nn.softplus(-positive - live.bias), axis)
  level = jnp.zeros_like(positive) - live.bias
  x = live.scale * text
  return pull + _loss(functools.partial(_sigmoid, axis=axis), x, image, level, ids)


def triplet(text, image, ids, live, axis=None):
  """As dense.triplet."""
  level = live.scale * (pair_scores.positives(text, image) - HINGE_MARGIN)
  return _loss(functools.partial(_hinge, axis=axis), live.scale * text, image, level, ids)


def contrastive(text, image, ids, live, axis=None):
  """As dense.contrastive."""
  positive = live.scale * pair_scores.positives(text, image)
  pull = collectives.mean(live.scale - positive, axis)
  level = jnp.full_like(positive, live.scale * HINGE_MARGIN)
  hinge = functools.partial(_hinge, axis=axis)
  return pull + _loss(hinge, live.scale * text, image, level, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(differentiate, x, y, level, ids):  # [n, D], [n, D], [n], tuple of [n] -> []
  """differentiate(x, y, level, ids) -> value, (dx, dy, dlevel)."""
  return differentiate(x, y, level, ids)[0]


def _backward(differentiate, gradients, g):
  return *(g * gradient for gradient in gradients), None


_loss.defvjp(lambda differentiate, *arguments: differentiate(*arguments), _backward)


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

  _, dx, dy, (value, slope) = sweep(weigh, (), x, y, level, ids, axis)
  n = collectives.total(len(x), axis)
  return collectives.mean(value, axis), (dx / n, collectives.scatter(dy, axis) / n, -slope / n)


def _batch(x, y, level, ids, keep, axis):
  """mean_i log(1 + Z·exp(−level_i)), Z over the negatives of the whole batch; and its gradients."""
  mined = selection.kth_largest(x, y, ids, keep, axis) if keep < 1 else None

  columns = collectives.gather(y, axis)  # [N, D]

  def weigh(state, scores, strip):
    level, x = strip
    high, z, ties = state
    higher = jnp.maximum(high, jnp.max(scores))
    decay = jnp.exp(high - higher)
    weight = jnp.exp(scores - higher)  # [R, N]
    tie_dx = ()
    if mined:
      weight *= mined.weights(scores)
      ties, tie_dx = tied_scores.add(mined, ties, scores, x, columns, axis)
    z = z * decay + jnp.sum(weight, axis=0)  # [N]: one sum of N² terms would lose digits
    rows = jnp.full_like(level, higher), tie_dx
    return (higher, z, ties), weight, jnp.ones_like(level), decay, rows

  ties = tied_scores.none(columns) if mined else ()
  state = (jnp.float32(-1e38), jnp.zeros(len(columns)), ties)
  (high, z, ties), dx, dy, rows = sweep(weigh, state, x, y, (level, x), ids, axis)
  top = collectives.largest(high, axis)
  highs, tie_dx = rows
  dx, dy = dx * jnp.exp(highs - top)[:, None], dy * jnp.exp(high - top)
  z = jnp.sum(z) * jnp.exp(high - top)
  if mined:
    factor = tied_scores.factor(mined, ties.counts, top, axis)
    dx, dy, z = dx + factor * tie_dx, dy + factor * ties.dy.T, z + factor * jnp.sum(ties.z)
    z += 0 * mined.score  # keeps a search that failed visible, as NaN
  z = collectives.total(z, axis)
  excess = top + jnp.log(z) - level  # [n]
  slope = jax.nn.sigmoid(excess) / collectives.total(len(x), axis)
  factor = collectives.total(jnp.sum(slope), axis) / jnp.where(z == 0, 1, z)
  dx, dy = factor * dx, collectives.scatter(factor * dy, axis)
  return collectives.mean(jax.nn.softplus(excess), axis), (dx, dy, -slope)


def _sigmoid(x, y, level, ids, axis):
  """mean_i Σ_j log(1 + exp(s_ij − level_i)) over the negatives; and its gradients."""

  def weigh(state, scores, level):
    excess = scores - level[:, None]  # [R, N]
    value = jnp.sum(jax.nn.softplus(excess), axis=1)
    weight = jax.nn.sigmoid(excess)
    return state, weight, jnp.ones_like(level), 1, (value, jnp.sum(weight, axis=1))

  _, dx, dy, (value, slope) = sweep(weigh, (), x, y, level, ids, axis)
  n = collectives.total(len(x), axis)
  return collectives.mean(value, axis), (dx / n, collectives.scatter(dy, axis) / n, -slope / n)


def _hinge(x, y, level, ids, axis, over="negatives"):
  """Mean of [s_ij − level_i]₊ over the negatives, or over those above the level ("violations")."""

  def weigh(state, scores, level):
    excess = scores - level[:, None]  # [R, N]
    weight = (excess > 0).astype(jnp.float32)
    value = jnp.sum(jax.nn.relu(excess), axis=1)
    slope = jnp.sum(weight, axis=1)
    count = jnp.sum(~jnp.isneginf(scores), axis=1, dtype=jnp.float32)
    count = slope if over == "violations" else count
    return state, weight, jnp.ones_like(level), 1, (value, slope, count)

  _, dx, dy, (value, slope, count) = sweep(weigh, (), x, y, level, ids, axis)
  n = jnp.maximum(collectives.total(jnp.sum(count), axis), 1)
  # 0 * level keeps a NaN visible when there are no negatives.
  value = collectives.total(jnp.sum(value + 0 * level), axis) / n
  return value, (dx / n, collectives.scatter(dy, axis) / n, -slope / n)
