"""Corrected cross-example softmax without the score matrix: exact gradients from two sweeps.

Let l = x·yᵀ, r_i and c_j the log-sum-exp of the negatives of row i and of column j, κ the
correction and t_ij = l_ij − κ·(r_i + c_j). The loss is cross-example softmax of t,

  mean_i log(1 + Z·exp(−t_ii)),  Z = Σ exp(t_ij) over the negatives.

The first sweep goes over strips of whole rows, so it knows r_i in the strip and accumulates over
strips, per column, c_j and G_j = log Σ_i exp(l_ij − κ·r_i). Then Z = Σ_j exp(G_j − κ·c_j), the
slope p_i of each positive (the derivative by −t_ii), their sum P and the derivative by c_j follow:

  C_j = κ·(p_j − P·exp(G_j − κ·c_j) / Z)

In the second sweep the sum of a row of exp(t_ij) gives the derivative by r_i in the same way, R_i,
and the weight of a pair is complete:

  W_ij = P·exp(t_ij) / Z + R_i·exp(l_ij − r_i) + C_j·exp(l_ij − c_j)

That is 8N²D operations where cross-example softmax takes 6N²D.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores
from xe_retrieval.losses.strip_sweep import sweep

NONE = -1e38  # a maximum of nothing yet; −inf would give NaN in differences


def batch(x, y, level, ids, correction, share, axis):
  """share × loss of the corrected scores + (1 − share) × that of the plain ones; gradients."""
  rows, columns, corrected = _normalizers(x, y, ids, correction, axis)  # [n], [N], [N]
  own = collectives.own(columns, axis)  # [n]
  n = collectives.total(len(x), axis)
  r, c = _or_zero(rows), _or_zero(columns)

  def slopes(log_z, level):  # -> value, slopes [n], their sum
    slope = jax.nn.sigmoid(log_z - level) / n
    value = collectives.mean(jax.nn.softplus(log_z - level), axis)
    return value, slope, collectives.total(jnp.sum(slope), axis)

  by_column = corrected - correction * c  # [N] log of column j's share of Z
  log_z = jax.nn.logsumexp(by_column)
  value, slope, total = slopes(log_z, level - correction * (r + _or_zero(own)))
  value, slope, total = share * value, share * slope, share * total
  log_z = _or_zero(log_z)
  every_slope = collectives.gather(slope, axis)  # [N]
  column_factor = correction * (every_slope - total * jnp.exp(by_column - log_z))  # [N] C_j

  plain_slope = jnp.zeros_like(slope)
  if share < 1:
    top = collectives.largest(jnp.max(rows), axis)
    plain_log_z = _or_zero(top)
    plain_log_z += jnp.log(collectives.total(jnp.sum(jnp.exp(rows - plain_log_z)), axis))
    plain_value, plain_slope, plain_total = slopes(plain_log_z, level)
    value += (1 - share) * plain_value
    plain_slope, plain_total = (1 - share) * plain_slope, (1 - share) * plain_total
    plain_log_z = _or_zero(plain_log_z)

  def weigh(state, scores, strip):  # scores [R, N]
    r, slope = strip
    weight = jnp.exp(scores - correction * (r[:, None] + c) - log_z)
    row_factor = correction * (slope - total * jnp.sum(weight, axis=1))  # [R] R_i
    weight = total * weight + row_factor[:, None] * jnp.exp(scores - r[:, None])
    weight += column_factor * jnp.exp(scores - c)
    if share < 1:
      weight += plain_total * jnp.exp(scores - plain_log_z)
    return state, weight, jnp.ones_like(r), 1, ()

  _, dx, dy, _ = sweep(weigh, (), x, y, (r, slope), ids, axis)
  return value, (dx, collectives.scatter(dy, axis), -slope - plain_slope)


def pairs(x, y, level, ids, correction, axis):
  """x [n, D+2], y [n, D+2], level [n] whose products x·yᵀ are the corrected scores.

  For mining, which has to select among these: t_ij = [x_i, −κ·r_i, 1]·[y_j, 1, −κ·c_j].
  """
  r, c = normalizers(axis, x, y, ids)
  one = jnp.ones_like(r)
  x = jnp.concatenate([x, jnp.stack([-correction * r, one], axis=1)], axis=1)
  y = jnp.concatenate([y, jnp.stack([one, -correction * c], axis=1)], axis=1)
  return x, y, level - correction * (r + c)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalizers(axis, x, y, ids):  # [n, D], [n, D], tuple of [n] -> [n], [n]
  """log Σ exp of the negatives of each row and of each column of x·yᵀ; 0 if there are none."""
  rows, columns, _ = _normalizers(x, y, ids, 0.0, axis)
  return _or_zero(rows), collectives.own(_or_zero(columns), axis)


def _forward(axis, x, y, ids):
  r, c = normalizers(axis, x, y, ids)
  return (r, c), (x, y, ids, r, c)


def _backward(axis, saved, gradients):
  x, y, ids, r, c = saved
  row_factor, column_factor = gradients
  c, column_factor = collectives.gather((c, column_factor), axis)  # [N]

  def weigh(state, scores, strip):
    r, row_factor = strip
    weight = row_factor[:, None] * jnp.exp(scores - r[:, None])
    weight += column_factor * jnp.exp(scores - c)
    return state, weight, jnp.ones_like(r), 1, ()

  _, dx, dy, _ = sweep(weigh, (), x, y, (r, row_factor), ids, axis)
  return dx, collectives.scatter(dy, axis), None


normalizers.defvjp(_forward, _backward)


def _normalizers(x, y, ids, correction, axis):
  """r [n], c [N] and G [N] of the module's docstring, −inf where there is no negative."""
  columns, column_ids = collectives.gather((y, ids), axis)
  cut, real = pair_scores.strips((x, ids), len(columns))

  def step(carry, strip):
    (x, ids), real = strip
    scores = pair_scores.scores(x, columns, ids, column_ids, real)  # [R, N]
    high = _or_zero(jnp.max(scores, axis=1))
    r = high + jnp.log(jnp.sum(jnp.exp(scores - high[:, None]), axis=1))  # [R]
    shifted = scores - correction * _or_zero(r)[:, None]
    return (_add(carry[0], scores), _add(carry[1], shifted)), r

  empty = jnp.full(len(columns), NONE), jnp.zeros(len(columns))
  carry = collectives.varying((empty, empty), axis)
  (c, g), r = lax.scan(step, carry, (cut, real))
  return r.reshape(-1)[: len(x)], _finish(c, axis), _finish(g, axis)


def _add(running, scores):  # (highest [N], Σ exp(score − highest) [N]), [R, N] -> the same
  high, z = running
  higher = jnp.maximum(high, jnp.max(scores, axis=0))
  return higher, z * jnp.exp(high - higher) + jnp.sum(jnp.exp(scores - higher), axis=0)


def _finish(running, axis):  # -> [N] log Σ exp over all devices
  high, z = running
  top = collectives.largest(high, axis)
  return top + jnp.log(collectives.total(z * jnp.exp(high - top), axis))


def _or_zero(x):
  return jnp.where(jnp.isneginf(x), 0, x)
