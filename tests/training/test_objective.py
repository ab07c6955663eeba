"""What the loss learns, what follows the step, which rows are negatives; checkpoints of these."""

import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.test_step import batch, take
from xe_retrieval import config as config_lib
from xe_retrieval import main
from xe_retrieval import model as models
from xe_retrieval.training import objective, optimizers

ONE = jax.devices()[:1]


@pytest.fixture
def learning(config):
  """sigmoid that learns its scale and its bias; Adam's first step moves each by learning_rate."""
  config.loss, config.scale_learned, config.bias_learned = "sigmoid", True, True
  config.image.batch_norm = "frozen"
  for tower in (config.text, config.image):
    tower.learning_rate = tower.end_learning_rate = 0.01
    tower.warmup_steps = 0
  return config


def test_scale_and_bias_are_learned_in_micro_batches_and_on_devices_alike(learning):
  variables, state, metrics = take(learning)
  start = {"log_scale": np.log(20.0), "bias": -np.log(16.0)}
  moved = jax.tree.map(lambda a, b: abs(a - b), jax.device_get(state.params["loss"]), start)
  chex.assert_trees_all_close(moved, {"log_scale": 0.01, "bias": 0.01}, rtol=1e-3)
  np.testing.assert_allclose(metrics["learned/bias"], start["bias"], rtol=1e-6)
  assert metrics["gradient_norm/loss"] > 1e-3
  assert state.variables()["params"].keys() == variables["params"].keys() == {"text", "image"}

  learning.micro_batch, learning.mesh.shard_parameters = 8, True
  _, other, same = take(learning, devices=4)
  chex.assert_trees_all_close(same, metrics, rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_close(other.params["loss"], state.params["loss"], rtol=1e-5)


def test_no_weight_decay_and_the_schedule_of_the_text_tower(learning):
  learning.text.weight_decay, learning.text.freeze = 10.0, "none"
  params = objective.parameters(learning)
  towers = {"text": {"projection": {"kernel": jnp.ones((2, 2))}}, "image": {}}
  optimizer = optimizers.make(learning, towers | params)
  updates, _ = optimizer.update(
    jax.tree.map(jnp.ones_like, towers | params),
    optimizer.init(towers | params),
    towers | params,
  )
  chex.assert_trees_all_close(
    updates["loss"], {"log_scale": jnp.array(-0.01), "bias": jnp.array(-0.01)}, rtol=1e-4
  )


def test_a_learned_scale_stays_below_100():
  params = {"text": jnp.ones(1), "loss": {"log_scale": jnp.array(5.0), "bias": jnp.array(7.0)}}
  clipped = objective.clip(params)
  np.testing.assert_allclose(np.exp(clipped["loss"]["log_scale"]), 100.0, rtol=1e-5)
  assert clipped["loss"]["bias"] == 7 and clipped["text"] == 1
  assert objective.clip({"text": 1}) == {"text": 1}


def test_the_weight_of_the_plain_cosine_falls_from_1000_to_5(config):
  config.steps, config.margin_annealing = 1_000, 0.1
  weights = [float(objective.softening(config, step)) for step in (0, 10, 50, 100, 1_000)]
  # 1 + 199·step / 100 divides 1,000.
  np.testing.assert_allclose(weights, [1_000, 1_000 / 20.9, 1_000 / 100.5, 5, 5], rtol=1e-5)


def test_the_margin_follows_the_step(config):
  config.loss = "l_softmax"
  text, image = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
  loss = objective.make_loss(config, None)
  minimised = objective.make(config, loss)
  assert minimised(text, image, {}, {}, 0) == loss(text, image, softening=1_000.0)
  assert minimised(text, image, {}, {}, config.steps) == loss(text, image, softening=5.0)
  assert loss(text, image, softening=5.0) > loss(text, image, softening=1_000.0)


def test_the_mask_of_negatives(config):
  text, image = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
  data = batch(config)
  ids = {name: data[name] for name in ("text_id", "image_id")}
  loss = objective.make_loss(config, None)
  assert objective.make(config, loss)(text, image, ids, {}, 0) == loss(text, image, **ids)
  config.mask = "diagonal"
  assert objective.make(config, loss)(text, image, ids, {}, 0) == loss(text, image)
  assert loss(text, image) > loss(text, image, **ids)


def test_a_run_that_learns_its_scale_resumes_and_is_restored(learning, tmp_path):
  learning.ema_decay = 0.9
  finished = jax.device_get(main.train(learning, tmp_path, ONE))
  assert finished.params["loss"]["log_scale"] != np.float32(np.log(20.0))
  restored = models.restore(tmp_path, "latest").variables["params"]
  chex.assert_trees_all_equal(jax.device_get(restored), finished.variables()["params"])
  shutil.rmtree(tmp_path / "checkpoints" / "4")
  chex.assert_trees_all_equal(jax.device_get(main.train(learning, tmp_path, ONE)), finished)


@pytest.mark.parametrize(
  "fields, says",
  [
    (dict(correction=1.5), r"config.correction=1.5 should be in \[0, 1\]"),
    (dict(corrected_share=0.0), r"config.corrected_share=0.0 should be in \(0, 1\]"),
    (dict(scale=400.0, scale_learned=True), "config.scale=400.0 should be at most 100"),
    (dict(bias_learned=True), "config.loss='cross_example_softmax' should be sigmoid"),
    (dict(margin_floor=0.0), "config.margin_floor=0.0 should be above 0"),
    (dict(margin_start=1.0), "config.margin_start=1.0 should be at least margin_floor"),
    (dict(margin_annealing=2.0), "config.margin_annealing=2.0 should be a share"),
    (dict(tcm_weight=-1.0), "config.tcm_weight=-1.0 should be at least 0"),
    (dict(tcm_negative=2.0), "config.tcm_negative=2.0 should be a cosine"),
    (dict(mask="none"), "config.mask='none' should be ids or diagonal"),
  ],
)
def test_wrong_fields(config, fields, says):
  config.update(fields)
  with pytest.raises(ValueError, match=says):
    config_lib.validate(config)
