"""Dense and streaming against float64 NumPy: values, gradients, devices, bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.losses import reference
from xe_retrieval import losses
from xe_retrieval.losses import pair_scores

NAMES = tuple(losses.names())
# A softmax per query, a pairwise loss, mining in the whole batch, and normalisers of rows and
# columns: enough to vary devices by.
DISTINCT = (
  "symmetric",
  "triplet",
  "cross_example_negative_mining",
  "corrected_cross_example_softmax",
)


@pytest.fixture(autouse=True)
def several_strips(monkeypatch):
  monkeypatch.setattr(pair_scores, "STRIP", 32)


@functools.cache
def batch(n):  # text, image [n, 8], ids that repeat
  random = np.random.default_rng(n)
  text = random.normal(size=(n, 8))
  image = text + random.normal(size=(n, 8))
  text_id, image_id = random.integers(0, 2 * n, n), random.integers(0, 2 * n, n)
  text_id[: n // 8], image_id[n // 8 : n // 4] = 3, 5
  ids = text_id.astype(np.int32), image_id.astype(np.int32)
  return text.astype(np.float32), image.astype(np.float32), *ids


@functools.cache
def all_losses(implementation, devices=None, names=NAMES, **settings):
  """One compilation for all names: (scale, *batch) -> {name: (value, (d text, d image))}."""
  mesh = None
  if devices:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), auto, devices=jax.devices()[:devices])

  def run(scale, *batch):
    get = functools.partial(losses.get, scale=scale, implementation=implementation, mesh=mesh)
    get = functools.partial(get, **settings)
    return {name: jax.value_and_grad(get(name), (0, 1))(*batch) for name in names}

  return jax.jit(run)


def check(result, expected, rtol=1e-5):
  value, gradients = result
  np.testing.assert_allclose(value, expected[0], rtol=rtol)
  for gradient, wanted in zip(gradients, expected[1:], strict=True):
    gradient = np.asarray(gradient, np.float64)
    np.testing.assert_allclose(gradient, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_has_the_gradient_of_its_value(name):
  text, image, *ids = batch(16)
  text, image = text.astype(np.float64), image.astype(np.float64)
  _, *gradients = reference.value_and_gradients(name, text, image, *ids)
  random = np.random.default_rng(0)
  for which, gradient in enumerate(gradients):
    for _ in range(8):
      step = 1e-6 * random.normal(size=text.shape)
      moved = [
        reference.value_and_gradients(
          name, text + sign * step * (which == 0), image + sign * step * (which == 1), *ids
        )[0]
        for sign in (1, -1)
      ]
      np.testing.assert_allclose((moved[0] - moved[1]) / 2, (gradient * step).sum(), rtol=1e-4)


@pytest.mark.parametrize("n", [64, 77])  # strips of 32 divide the first
@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_values_and_gradients(implementation, n):
  results = all_losses(implementation)(20.0, *batch(n))
  for name in NAMES:
    check(results[name], reference.value_and_gradients(name, *batch(n)))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_any_number_of_devices(implementation, devices):
  names = NAMES if devices == 8 else DISTINCT
  results = all_losses(implementation, devices, names)(20.0, *batch(72))
  for name in names:
    check(results[name], reference.value_and_gradients(name, *batch(72)))


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_bfloat16(implementation):
  text, image, *ids = batch(64)
  text, image = jnp.asarray(text, jnp.bfloat16), jnp.asarray(image, jnp.bfloat16)
  names = ("cross_example_softmax", "contrastive")  # all start from the same float32 rows
  results = all_losses(implementation, names=names)(20.0, text, image, *ids)
  for name in names:
    value, *gradients = reference.value_and_gradients(name, text, image, *ids)
    np.testing.assert_allclose(results[name][0], value, rtol=1e-5)  # computed in float32
    assert all(gradient.dtype == jnp.bfloat16 for gradient in results[name][1])
    check(results[name], (value, *gradients), rtol=2**-8)


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
@pytest.mark.parametrize("scale", [1.0, 100.0, 400.0])
def test_scales(implementation, scale):
  results = all_losses(implementation)(scale, *batch(64))
  for name in NAMES:
    expected = reference.value_and_gradients(name, *batch(64), scale=scale)
    # The rounding error of a score grows with the scale; exp turns it into a relative error.
    check(results[name], expected, rtol=1e-5 * max(1, scale / 20))


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_part_of_the_loss_and_of_the_scores_corrected(implementation):
  names = ("corrected_cross_example_softmax", "corrected_cross_example_negative_mining")
  settings = dict(correction=0.3, corrected_share=0.6)
  results = all_losses(implementation, names=names, **settings)(20.0, *batch(77))
  for name in names:
    check(results[name], reference.value_and_gradients(name, *batch(77), **settings))


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_a_row_without_negatives_beside_rows_that_have_some(implementation):
  text, image, *_ = batch(64)
  half = np.arange(64) < 32
  ids = np.where(half, 0, np.arange(64)), np.where(half, np.arange(64), 0)
  ids = [x.astype(np.int32) for x in ids]  # row 0 shares its text with a half, its image with one
  ids[1][0] = 0
  results = all_losses(implementation)(20.0, text, image, *ids)
  for name in NAMES:
    check(results[name], reference.value_and_gradients(name, text, image, *ids))


@pytest.mark.parametrize("devices", [None, 8])
@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_live_scalars_are_differentiable(implementation, devices):
  """A learned scale and bias, and the annealed softening, against differences of the reference."""
  text, image, *ids = batch(64)
  scalars = {
    "cross_example_softmax": dict(scale=12.0),
    "corrected_cross_example_softmax": dict(scale=12.0),
    "triplet": dict(scale=12.0),
    "sigmoid": dict(scale=12.0, bias=-4.0),
    "a_softmax": dict(scale=12.0, softening=30.0),
  }
  mesh = devices and jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))

  @jax.jit
  @jax.grad
  def slopes(live):
    get = functools.partial(losses.get, implementation=implementation, mesh=mesh)
    return sum(get(name)(text, image, *ids, **live[name]) for name in live)

  found = slopes(scalars)
  for name, live in scalars.items():
    for scalar, at in live.items():
      moved = [
        reference.value_and_gradients(name, text, image, *ids, **live | {scalar: x})[0]
        for x in (at + 1e-5, at - 1e-5)
      ]
      np.testing.assert_allclose(found[name][scalar], (moved[0] - moved[1]) / 2e-5, rtol=1e-4)
