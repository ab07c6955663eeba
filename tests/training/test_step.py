"""One step: the same gradients in micro-batches and with a sharded state; clipping and EMA."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xe_retrieval.data import mesh
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import step, utilization

ROWS = 16


@pytest.fixture
def config(config):
  """A step moves the parameters by exactly their gradient; BatchNorm is frozen."""
  for tower in (config.text, config.image):
    tower.optimizer, tower.learning_rate, tower.end_learning_rate = "sgd", 1.0, 1.0
    tower.warmup_steps, tower.weight_decay = 0, 0.0
  config.image.batch_norm = "frozen"
  config.text.mlp = 64  # large enough to be sharded
  return config


def batch(config):
  random = np.random.default_rng(0)
  return {
    "tokens": random.integers(1, 999, (ROWS, config.text.tokens), dtype=np.int32),
    "image": random.integers(0, 256, (ROWS, config.image.size, config.image.size, 3), np.uint8),
    "text_id": np.arange(ROWS, dtype=np.int32),
    "image_id": np.arange(ROWS, dtype=np.int32) // 2,
  }


def take(config, devices=1, steps=1):
  """-> variables before, state after, metrics."""
  where = mesh.make(jax.devices()[:devices])
  built = step.build(config, where)
  variables = dual_encoder.init(config, built.model)
  state = step.init(config, jax.device_get(variables), built.optimizer, where)
  chex.assert_trees_all_equal_shapes_and_dtypes(state, built.state)
  put = functools.partial(jax.device_put, device=mesh.rows(where))
  for _ in range(steps):
    state, metrics = built.train_step(state, jax.tree.map(put, batch(config)))
  assert built.train_step._cache_size() == 1
  return jax.device_get(variables), state, jax.device_get(metrics)


def assert_close(params, expected, before):
  """Gradients differ by at most 1e-5 of the largest."""
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, before)
  largest = max(jax.tree.leaves(moved))
  chex.assert_trees_all_close(params, expected, atol=1e-5 * largest)


@pytest.mark.parametrize(("micro", "devices", "shard"), [(4, 1, False), (0, 4, True), (8, 4, True)])
def test_micro_batches_and_sharding_do_not_change_the_result(config, micro, devices, shard):
  variables, whole, expected = take(config)
  config.micro_batch, config.mesh.shard_parameters = micro, shard
  _, state, metrics = take(config, devices)
  if shard:
    kernel = state.params["text"]["tower"]["layer_0"]["mlp_in"]["kernel"]  # [16, 64]
    assert kernel.addressable_shards[0].data.shape == (16, 16)
  whole, state = jax.device_get((whole, state))
  assert_close(state.params, whole.params, variables["params"])
  chex.assert_trees_all_equal(state.batch_stats, whole.batch_stats)
  chex.assert_trees_all_close(metrics, expected, rtol=1e-5, atol=1e-5)
  assert expected["gradient_norm/text"] > 1e-3 and expected["gradient_norm/image"] > 1e-3


def test_dropout_is_replayed(config):
  """Both passes over a micro-batch use its dropout mask."""
  config.text.dropout, config.micro_batch = 0.5, 4
  variables, state, _ = take(config)
  built = step.build(config, mesh.make(jax.devices()[:1]))
  rngs = jax.random.split(jax.random.fold_in(state.rng, 0), ROWS // 4)
  data = batch(config)

  def objective(params):
    parts = [
      built.model.apply(
        {**variables, "params": params},
        data["tokens"][4 * i : 4 * i + 4],
        data["image"][4 * i : 4 * i + 4],
        train=True,
        rngs={"dropout": rngs[i]},
      )
      for i in range(ROWS // 4)
    ]
    text, image = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    return built.loss(text, image, text_id=data["text_id"], image_id=data["image_id"])

  grads = jax.jit(jax.grad(objective))(variables["params"])
  expected = jax.tree.map(lambda p, g: p - g, variables["params"], grads)
  assert_close(*jax.device_get((state.params, expected)), variables["params"])


def test_running_statistics_move_once_towards_the_mean_of_the_micro_batches(config):
  config.image.batch_norm = "sync"
  stem = lambda state: jax.device_get(state.batch_stats["image"]["tower"]["stem"]["norm"])  # noqa: E731
  whole = stem(take(config)[1])
  config.micro_batch = 4
  micro = stem(take(config)[1])
  np.testing.assert_allclose(micro["mean"], whole["mean"], atol=1e-6)
  assert (
    np.abs(micro["var"] - whole["var"]).max() > 1e-5
  )  # without the variance between micro-batches


def test_gradient_clipping_and_the_moving_average(config):
  config.clip_norm, config.ema_decay = 0.01, 0.75
  variables, state, metrics = take(config)
  state = jax.device_get(state)
  moved = jax.tree.map(np.subtract, state.params, variables["params"])
  np.testing.assert_allclose(optax.global_norm(moved), 0.01, rtol=1e-2)
  assert metrics["gradient_norm/text"] > 0.01  # logged before clipping
  mean = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, variables["params"], state.params)
  chex.assert_trees_all_close(state.ema["params"], mean, atol=1e-7)


def test_the_moving_average_of_the_parameters_has_that_of_the_statistics(config):
  config.image.batch_norm, config.ema_decay = "sync", 0.75
  variables, state, _ = take(config)
  state = jax.device_get(state)
  mean = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, variables["batch_stats"], state.batch_stats)
  used = state.variables()["batch_stats"]
  chex.assert_trees_all_close(used, mean, rtol=1e-5)
  live = jax.tree.leaves(state.batch_stats)
  assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(jax.tree.leaves(used), live, strict=True))


def test_percentiles_of_scores_are_those_of_the_matrix(config):
  variables, _, metrics = take(config)
  data, model = batch(config), step.build(config, mesh.make(jax.devices()[:1])).model
  text, image = model.apply(variables, data["tokens"], data["image"])
  text, image = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
  scores = np.asarray(text @ image.T)
  negative = scores[data["image_id"][:, None] != data["image_id"]]
  for q in step.PERCENTILES:
    low = np.percentile(np.diag(scores), q), np.percentile(negative, q)
    found = metrics[f"score/positive_p{q:02}"], metrics[f"score/negative_p{q:02}"]
    np.testing.assert_allclose(found, low, atol=1e-4)


def test_bfloat16_and_remat_give_nearly_the_same_loss(config):
  _, _, expected = take(config)
  config.dtype, config.remat = "bfloat16", True
  _, state, metrics = take(config)
  np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=0.05)
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_peaks_and_work_of_a_step(config):
  assert utilization.peak("TPU v5 lite") == 197e12 and utilization.peak("TPU v5p") == 459e12
  assert utilization.peak("cpu") is None
  one = utilization.step_flops(step.build(config, mesh.make(jax.devices()[:1])))
  config.batch_size, config.remat, config.micro_batch = 32, True, 8
  np.testing.assert_allclose(
    utilization.step_flops(step.build(config, mesh.make(jax.devices()[:1]))), 2 * one, rtol=0.05
  )
