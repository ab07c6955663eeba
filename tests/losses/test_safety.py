"""Degenerate batches: no negatives, zeros, identical rows, NaN, large scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xe_retrieval import losses

NAMES = losses.names()
NORMAL = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


@functools.cache
def all_losses(implementation):
  def run(scale, text, image, text_id):
    get = functools.partial(losses.get, scale=scale, implementation=implementation)
    return {name: jax.value_and_grad(get(name), (0, 1))(text, image, text_id) for name in NAMES}

  return jax.jit(run)


@pytest.fixture(params=["dense", "streaming"])
def run(request):
  def run(text, image, text_id=None, scale=20.0):
    text_id = np.arange(len(text)) if text_id is None else np.asarray(text_id)
    return all_losses(request.param)(scale, text, image, text_id.astype(np.int32))

  return run


def finite(results):
  return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(results))


@pytest.mark.parametrize("scale", [1.0, 20.0, 400.0])
@pytest.mark.parametrize("rows", ["identical", "opposite", "zero", "tiny", "huge"])
def test_degenerate_rows_are_finite(run, rows, scale):
  text, image = {
    "identical": (NORMAL[0] * 0 + 1, NORMAL[0] * 0 + 1),
    "opposite": (NORMAL[0] * 0 + 1, NORMAL[0] * 0 - 1),
    "zero": (NORMAL[0] * 0, NORMAL[1]),
    "tiny": (NORMAL[0] * 1e-30, NORMAL[1]),
    "huge": (NORMAL[0] * 1e30, NORMAL[1]),
  }[rows]
  assert finite(run(text, image, scale=scale))


def test_length_of_embeddings_has_no_effect(run):
  expected = run(*NORMAL)
  for factor in (1e-30, 1e30):
    for name, (value, _) in run(NORMAL[0] * factor, NORMAL[1]).items():
      np.testing.assert_allclose(value, expected[name][0], rtol=1e-5)


@pytest.mark.parametrize("n", [1, 8])
def test_no_negatives(run, n):
  results = run(*NORMAL[:, :n], text_id=np.zeros(n))
  assert finite(results)
  for name, (value, gradients) in results.items():
    if name not in ("sigmoid", "contrastive", "tcm"):  # these still attract the positives
      assert value == 0
      assert all(np.all(gradient == 0) for gradient in gradients)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 8])
def test_a_nonfinite_row_makes_the_loss_nan(run, n, bad):
  text, image = NORMAL[:, :n].copy()
  text[0, 1] = bad
  for value, _ in run(text, image).values():
    assert np.isnan(value)


def test_the_value_is_the_same_without_a_gradient():
  expected = all_losses("streaming")(20.0, *NORMAL, np.arange(8, dtype=np.int32))
  # One for each kind of sweep.
  names = ("snm", "cross_example_softmax", "corrected_cross_example_softmax", "sigmoid", "triplet")

  @jax.jit
  def values(text, image):
    return {name: losses.get(name, implementation="streaming")(text, image) for name in names}

  for name, value in values(*NORMAL).items():
    np.testing.assert_allclose(value, expected[name][0], rtol=1e-6)


def test_shards_must_be_equal():
  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
  with pytest.raises(ValueError, match="9 rows do not divide over 8 devices of 'data'"):
    losses.get("snm", mesh=mesh)(jnp.ones((9, 2)), jnp.ones((9, 2)))
  with pytest.raises(ValueError, match="'batch' is not an axis of the mesh.*'data'"):
    losses.get("snm", mesh=mesh, axis="batch")
