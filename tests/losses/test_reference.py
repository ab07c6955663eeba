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
# A softmax per query, a pairwise loss, and mining in the whole batch: enough to vary devices by.
DISTINCT = ("symmetric", "triplet", "cross_example_negative_mining")


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
def all_losses(implementation, devices=None, names=NAMES):
  """One compilation for all names: (scale, *batch) -> {name: (value, (d text, d image))}."""
  mesh = None
  if devices:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), auto, devices=jax.devices()[:devices])

  def run(scale, *batch):
    get = functools.partial(losses.get, scale=scale, implementation=implementation, mesh=mesh)
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


@pytest.mark.parametrize("name", ["cross_example_softmax", "triplet", "sigmoid"])
def test_a_learned_scale_has_the_same_gradient(name):
  text, image, *ids = batch(64)

  def value(scale, implementation):
    return losses.get(name, scale=scale, implementation=implementation)(text, image, *ids)

  slope = jax.jit(jax.grad(value), static_argnums=1)
  slopes = [slope(20.0, implementation) for implementation in ("dense", "streaming")]
  np.testing.assert_allclose(*slopes, rtol=1e-5)
  assert slopes[0] != 0
