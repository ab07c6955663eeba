"""Fast convolution, pooling and normalisation against XLA's own, gradients included."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xe_retrieval.towers import convolution, winograd


def draw(*shape):
  return jnp.array(np.random.default_rng(0).normal(size=shape), jnp.float32)


def assert_same(fast, plain, *inputs):
  """Equal values, and equal gradients of a random projection of the outputs."""

  @jax.jit
  def run(*inputs):
    weights = draw(*jax.eval_shape(plain, *inputs).shape)
    return [
      jax.value_and_grad(
        lambda *args, f=f: jnp.sum(f(*args) * weights), argnums=tuple(range(len(inputs)))
      )(*inputs)
      for f in (fast, plain)
    ]

  chex.assert_trees_all_close(*run(*inputs), rtol=1e-4, atol=1e-4)


def plain_convolution(x, kernel, stride=1):
  pad = (kernel.shape[0] // 2,) * 2
  dimensions = ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), (pad, pad), dimension_numbers=dimensions
  )


@pytest.mark.parametrize("height, width", [(8, 8), (7, 10)])
@pytest.mark.parametrize(
  "size, stride, channels, features",
  [(1, 1, 4, 6), (1, 2, 6, 4), (3, 1, 4, 6), (3, 2, 6, 4), (7, 2, 3, 4)],
)
def test_convolution(height, width, size, stride, channels, features):
  def plain(x, kernel):
    return plain_convolution(x, kernel, stride)

  x, kernel = draw(2, height, width, channels), draw(size, size, channels, features)
  assert_same(lambda x, kernel: convolution.convolve(x, kernel, stride), plain, x, kernel)


@pytest.mark.parametrize("height, width", [(1, 1), (4, 3), (7, 7), (6, 13), (16, 9)])
def test_winograd(height, width):
  """Any size, also one that is not a multiple of the tile, with errors near float32 rounding."""
  x, kernel = draw(2, height, width, 48), draw(3, 3, 48, 32)
  y, expected = winograd.convolve(x, kernel), jax.jit(plain_convolution)(x, kernel)
  assert y.shape == expected.shape
  assert np.abs(y - expected).max() < 5e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
  "shape, stride, dtype, chosen",
  [
    ((2, 16, 16, 32), 1, jnp.float32, True),
    ((2, 16, 16, 32), 2, jnp.float32, False),
    ((2, 16, 16, 32), 1, jnp.bfloat16, False),
    ((2, 16, 16, 16), 1, jnp.float32, False),  # few channels
    ((1, 16, 16, 32), 1, jnp.float32, False),  # few tiles
    ((32, 5, 5, 32), 1, jnp.float32, False),  # tiles mostly empty
  ],
)
def test_winograd_is_for_inference_where_it_is_faster(shape, stride, dtype, chosen):
  def is_plain(function):
    return "stablehlo.convolution" in jax.jit(function).lower(x, kernel).as_text()

  def convolve(x, kernel):
    return convolution.convolve(x, kernel, stride)

  x, kernel = jnp.zeros(shape, dtype), jnp.zeros((3, 3, shape[-1], 32), dtype)
  assert is_plain(convolve) != chosen
  assert is_plain(lambda x, kernel: jax.vjp(convolve, x, kernel)[0])


@pytest.mark.parametrize("height, width", [(8, 8), (7, 10)])
def test_max_pool(height, width):
  def plain(x):
    return nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))

  assert_same(convolution.max_pool, plain, draw(2, height, width, 4))


def test_batch_norm():
  def plain(x, scale, bias):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias

  def fast(x, scale, bias):
    return convolution.batch_norm(x, scale, bias, 1e-5)[0]

  x = 3 * draw(4, 5, 6, 7) + 2
  assert_same(fast, plain, x, draw(7), draw(7) + 1)
  _, mean, var = convolution.batch_norm(x, draw(7), draw(7), 1e-5)
  np.testing.assert_allclose(mean, np.mean(x, (0, 1, 2)), rtol=1e-4)
  np.testing.assert_allclose(var, np.var(x, (0, 1, 2)), rtol=1e-4)


def test_bfloat16_statistics_are_float32():
  x = (draw(8, 16, 16, 4) + 4).astype(jnp.bfloat16)
  y, mean, var = convolution.batch_norm(x, jnp.ones(4), jnp.zeros(4), 1e-5)
  assert (y.dtype, mean.dtype, var.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
  exact = np.asarray(x, np.float64)
  np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), rtol=1e-5)
  np.testing.assert_allclose(var, exact.var((0, 1, 2)), rtol=1e-4)
