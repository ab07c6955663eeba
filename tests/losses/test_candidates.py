"""Losses on candidate lists against sums in float64; what must and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xe_retrieval.data import mesh
from xe_retrieval.losses import candidates, dense
from xe_retrieval.losses.pair_scores import Live

NAMES = list(candidates.SCOPES)


def lists(b=8, k=5):
  random = np.random.default_rng(0)
  negative = random.random((b, k)) < 0.8
  negative[:, 0] = False
  negative[2] = False  # a caption without a wrong image
  return (3 * random.normal(size=(b, k))).astype(np.float32), negative


def reference(name, scores, negative):
  """The equations, one pair after the other, in float64."""
  scores, total = scores.astype(np.float64), 0.0
  if name == "binary_cross_entropy":
    pairs = [(s, 1) for s in scores[:, 0]] + [(s, -1) for s in scores[negative]]
    return np.mean([np.log1p(np.exp(-sign * s)) for s, sign in pairs])
  for b in range(len(scores)):
    rows = [b] if name == "sampled_softmax" else range(len(scores))
    z = sum(np.exp(scores[c, k]) for c in rows for k in np.flatnonzero(negative[c]))
    total += np.log1p(z * np.exp(-scores[b, 0]))
  return total / len(scores)


@pytest.mark.parametrize("name", NAMES)
def test_equations(name):
  scores, negative = lists()
  loss = candidates.get(name)
  np.testing.assert_allclose(loss(scores, negative), reference(name, scores, negative), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_equations(name):
  scores, negative = lists()
  found = jax.grad(candidates.get(name))(jnp.array(scores), negative)
  step, wide = 1e-6, scores.astype(np.float64)
  for at in np.ndindex(*scores.shape):
    moved = np.zeros_like(wide)
    moved[at] = step
    slope = reference_slope(name, wide, moved, negative) / (2 * step)
    np.testing.assert_allclose(found[at], slope, atol=1e-5)
    assert found[at] == 0 or negative[at] or at[1] == 0


def reference_slope(name, scores, moved, negative):
  return reference(name, scores + moved, negative) - reference(name, scores - moved, negative)


def test_by_hand():
  scores = jnp.array([[0.0, 0.0], [jnp.log(2.0), 0.0]])
  negative = jnp.array([[False, True], [False, True]])
  found = [float(candidates.get(name)(scores, negative)) for name in NAMES]
  log = np.log
  expected = [
    (log(2) + log(1.5)) / 2,
    (log(3) + log(2)) / 2,
    (log(2) + log(1.5) + 2 * log(2)) / 4,
  ]
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_order_masked_columns_and_levels(name):
  scores, negative = lists()
  loss = jax.jit(candidates.get(name))
  value = loss(scores, negative)
  rows = np.random.default_rng(1).permutation(len(scores))
  np.testing.assert_allclose(loss(scores[rows], negative[rows]), value, rtol=1e-6)
  columns = [0, 3, 1, 4, 2]
  np.testing.assert_allclose(loss(scores[:, columns], negative[:, columns]), value, rtol=1e-6)
  masked = np.where(negative | (np.arange(5) == 0), scores, 50.0)
  np.testing.assert_allclose(loss(masked, negative), value, rtol=1e-6)
  # A level per caption: only the softmax over a caption's own list does not see it.
  level = np.arange(len(scores), dtype=np.float32)[:, None]
  moved = abs(float(loss(scores + level, negative) - value))
  assert (moved < 1e-5) == (name == "sampled_softmax")
  moved = abs(float(loss(scores + 3, negative) - value))
  assert (moved < 1e-5) == (name != "binary_cross_entropy")


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_and_no_negatives(name):
  scores, negative = lists()
  value, grads = jax.value_and_grad(candidates.get(name))(100 * jnp.array(scores), negative)
  assert np.isfinite(value) and np.isfinite(grads).all()
  none = np.zeros_like(negative)
  value, grads = jax.value_and_grad(candidates.get(name))(jnp.array(scores), none)
  assert np.isfinite(value) and np.isfinite(grads).all()
  assert float(value) == 0 or name == "binary_cross_entropy"
  broken = scores.copy()
  broken[0, 0] = np.nan
  assert np.isnan(candidates.get(name)(broken, none))


@pytest.mark.parametrize("name", NAMES)
def test_eight_devices_agree_with_one(name):
  scores, negative = lists()
  where = mesh.make()
  sharded = jax.device_put((scores, negative), mesh.rows(where))
  value = jax.jit(jax.value_and_grad(candidates.get(name)))
  for a, b in zip(value(*sharded), value(scores, negative), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["sampled_softmax", "cross_example_softmax"])
def test_on_whole_rows_they_are_the_dual_encoders_losses(name):
  random = np.random.default_rng(0)
  text, image = (
    x / np.linalg.norm(x, axis=1, keepdims=True) for x in random.normal(size=(2, 6, 4))
  )
  text, image = jnp.float32(text), jnp.float32(image)
  scope = candidates.SCOPES[name]
  expected = dense.softmax(text, image, (jnp.arange(6),), Live(20.0, 0.0, 5.0), scope)
  columns = np.array([np.roll(np.arange(6), -b) for b in range(6)])  # its own image first
  scores = 20 * jnp.take_along_axis(text @ image.T, columns, axis=1)
  found = candidates.get(name)(scores, columns != columns[:, :1])
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_unknown_name_is_refused():
  with pytest.raises(
    ValueError, match="'triplet' is unknown for candidates; it is one of: sampled"
  ):
    candidates.get("triplet")
