"""Mining does not depend on two compiled products rounding in the same way."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.losses.test_selection import embeddings
from xe_retrieval import losses
from xe_retrieval.losses import pair_scores, selection, strip_sweep, tied_scores

PLAIN, CORRECTED = "cross_example_negative_mining", "corrected_cross_example_negative_mining"


@pytest.fixture(autouse=True)
def several_strips(monkeypatch):
  monkeypatch.setattr(pair_scores, "STRIP", 32)


def both_ways(shape):
  return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


@functools.cache
def loss_with(noise, name, devices=None):
  """The streaming loss whose sweep sees scores that are off by a few last digits of the largest."""

  def scores(x, y, rows, columns, real=None):
    exact = pair_scores.scores(x, y, rows, columns, real)
    return exact + 20 * 2.0**-22 * noise(exact.shape)

  module = types.SimpleNamespace(**vars(pair_scores) | {"scores": scores})
  mesh = devices and jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))
  loss = losses.get(name, implementation="streaming", mesh=mesh)
  batch = embeddings("normal")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(strip_sweep, "pair_scores", module)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*batch[:2], jnp.asarray(batch[2][0]))
  return traced.compile()


@functools.cache
def dense(name, kind):
  text, image, (ids,) = embeddings(kind)
  return jax.device_get(_dense(name)(text, image, jnp.asarray(ids)))


@functools.cache
def _dense(name):
  return jax.jit(jax.value_and_grad(losses.get(name), (0, 1)))


@pytest.mark.parametrize(
  "name, noise, kind",
  [
    *((PLAIN, both_ways, kind) for kind in ("normal", "tied", "nearly constant", "many zeros")),
    *((PLAIN, jnp.ones, kind) for kind in ("normal", "tied", "nearly constant", "many zeros")),
    *((CORRECTED, both_ways, kind) for kind in ("normal", "tied", "many zeros")),
  ],
)
def test_another_rounding_of_the_sweep_changes_digits_only(name, noise, kind):
  text, image, (ids,) = embeddings(kind)
  value, gradients = loss_with(noise, name)(text, image, jnp.asarray(ids))
  wanted, wanted_gradients = dense(name, kind)
  np.testing.assert_allclose(value, wanted, rtol=2e-5)
  for gradient, right in zip(gradients, wanted_gradients, strict=True):
    # Of nearly constant scores, rounding decides which are mined; their gradients are about 1e-5.
    np.testing.assert_allclose(gradient, right, rtol=0, atol=2e-3 * np.abs(right).max() + 1e-5)


def test_on_8_devices():
  for kind in ("normal", "tied"):
    text, image, (ids,) = embeddings(kind)
    value, _ = loss_with(jnp.ones, PLAIN, 8)(text, image, jnp.asarray(ids))
    np.testing.assert_allclose(value, dense(PLAIN, kind)[0], rtol=2e-5)


def test_few_ties_of_many_scores_need_no_sums_of_their_own(monkeypatch):
  """As in large batches: there, the sums would cost two products."""
  monkeypatch.setattr(tied_scores, "TIED", 1e-3)
  text, image, (ids,) = batch = embeddings("normal")
  mined = jax.jit(functools.partial(selection.kth_largest, keep=0.5))(*batch)
  assert not mined.tied and mined.margin == 0
  value, _ = loss_with.__wrapped__(both_ways, PLAIN)(text, image, jnp.asarray(ids))
  np.testing.assert_allclose(value, dense(PLAIN, "normal")[0], rtol=2e-5)


def test_a_search_that_does_not_end_makes_the_loss_nan(monkeypatch):
  monkeypatch.setattr(selection, "PASSES", 0)
  text, image, _ = embeddings("normal")
  assert np.isnan(losses.get(PLAIN, implementation="streaming")(text, image))
