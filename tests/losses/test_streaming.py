"""Streaming losses: linear memory, and one compilation inside a train step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xe_retrieval import losses
from xe_retrieval.losses import pair_scores

NAMES = losses.names()


@functools.cache
def compiled(name, n):
  loss = losses.get(name, implementation="streaming")
  x = jax.ShapeDtypeStruct((n, 16), jnp.float32)
  return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, x).compile()


@pytest.mark.parametrize(
  "name", ["snm", "cross_example_negative_mining", "corrected_cross_example_softmax"]
)
def test_memory_is_linear_in_the_batch(name):
  sizes = [compiled(name, n).memory_analysis().temp_size_in_bytes for n in (8192, 16384)]
  assert sizes[1] <= 2.1 * sizes[0]
  assert sizes[1] < 16384**2  # less than a byte per pair


@pytest.mark.parametrize("columns, rows", [(65_536, 256), (262_144, 256), (2**20, 64), (2**23, 32)])
def test_strips_of_many_columns_are_narrower(columns, rows):
  (strips,), real = pair_scores.strips((jnp.zeros((512, 1)),), columns)
  assert strips.shape == (512 // rows, rows, 1) and real is None


def test_one_compilation_in_a_train_step():
  loss = losses.get("cross_example_softmax", implementation="streaming")
  optimizer = optax.sgd(0.1)
  traces = []

  @jax.jit
  def step(params, state, image):
    traces.append(1)
    value, gradients = jax.value_and_grad(lambda p: loss(p["text"], image @ p["image"]))(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, value

  random = np.random.default_rng(0)
  image = jnp.asarray(random.normal(size=(40, 6)), jnp.float32)
  params = {"text": jnp.asarray(random.normal(size=(40, 4)), jnp.float32), "image": jnp.eye(6, 4)}
  state, values = optimizer.init(params), []
  for _ in range(20):
    params, state, value = step(params, state, image)
    values.append(float(value))
  assert len(traces) == 1
  assert values[-1] < values[0] - 1
