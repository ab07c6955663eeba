"""Calls of a loss: outside of jit, with ids of any type, on any mesh."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xe_retrieval import losses

NAME = "cross_example_softmax"
TEXT, IMAGE = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_outside_of_jit_it_is_compiled_once(implementation):
  compilations = []

  def listen(event, seconds, **_):
    compilations.extend([event] * event.endswith("backend_compile_duration"))

  loss = losses.get(NAME, implementation=implementation)
  first = np.asarray(loss(TEXT, IMAGE))
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    assert np.asarray(loss(TEXT, IMAGE)) == first
    assert not compilations
    loss(TEXT[:8], IMAGE[:8])  # another shape: the listener does work
    assert compilations
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def test_ids_may_be_strings_or_64_bit():
  loss = losses.get(NAME)
  groups = np.arange(16) // 3
  expected = loss(TEXT, IMAGE, image_id=jnp.asarray(groups))
  assert expected < loss(TEXT, IMAGE)
  assert loss(TEXT, IMAGE, image_id=[f"{group}.jpg" for group in groups]) == expected
  assert loss(TEXT, IMAGE, image_id=groups * 2**32) == expected  # their low 32 bits are equal
  assert loss(TEXT, IMAGE, text_id=np.arange(16), image_id=groups.astype(np.uint8)) == expected
  with pytest.raises(ValueError, match=r"image_id \(16, 1\) should have one id for each of 16"):
    loss(TEXT, IMAGE, image_id=groups[:, None])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_any_mesh(kind, shape):
  names = ("data", "model")[: len(shape)]
  mesh = jax.make_mesh(shape, names, (kind,) * len(shape))
  over_mesh = losses.get(NAME, implementation="streaming", mesh=mesh, axis="data")
  over_mesh = jax.jit(jax.value_and_grad(over_mesh, (0, 1)))
  for rows in ((TEXT, IMAGE), jax.device_put((TEXT, IMAGE), _rows(mesh))):
    chex.assert_trees_all_close(over_mesh(*rows), on_one_device(), rtol=1e-5, atol=1e-6)


@functools.cache
def on_one_device():
  loss = losses.get(NAME, implementation="streaming")
  return jax.device_get(jax.value_and_grad(loss, (0, 1))(TEXT, IMAGE))


def _rows(mesh):
  return NamedSharding(mesh, PartitionSpec("data"))
