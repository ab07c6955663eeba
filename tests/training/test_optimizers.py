"""One optimiser per tower, the paper's schedules, no updates of frozen parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import cc
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import optimizers


def test_the_papers_schedules():
  config = cc.get_config()
  text = optimizers.schedule(config.text, config.steps)
  image = optimizers.schedule(config.image, config.steps)
  np.testing.assert_allclose([text(0), text(750), text(1500)], [0, 5e-5, 1e-4], rtol=1e-5)
  np.testing.assert_allclose(text(13_250), 5e-5, rtol=1e-5)
  np.testing.assert_allclose([text(25_000), image(0), image(25_000)], [0, 3e-3, 5e-4], atol=1e-9)
  np.testing.assert_allclose(image(12_500), 1.75e-3, rtol=1e-5)


def test_each_tower_has_its_optimiser_and_frozen_parameters_have_none(config):
  config.text.freeze = "all"
  config.image.optimizer, config.image.learning_rate, config.image.warmup_steps = "sgd", 0.5, 0
  config.text.learning_rate, config.text.warmup_steps = 0.25, 0
  params = dual_encoder.init(config, dual_encoder.from_config(config))["params"]
  optimizer = optimizers.make(config, params)
  state = optimizer.init(params)
  updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
  assert all((u == 0).all() for u in jax.tree.leaves(updates["text"]["tower"]))
  np.testing.assert_allclose(updates["image"]["projection"]["kernel"], -0.5, rtol=1e-6)
  decayed = -0.25 * (1 + config.text.weight_decay * params["text"]["projection"]["kernel"])
  np.testing.assert_allclose(updates["text"]["projection"]["kernel"], decayed, rtol=1e-5)
  frozen = sum(p.size for p in jax.tree.leaves(params["text"]["tower"]))
  total = sum(p.size for p in jax.tree.leaves(params))
  moments = sum(x.size for x in jax.tree.leaves(state) if hasattr(x, "size") and x.ndim)
  learning = params["text"]["projection"]["kernel"].size
  assert moments == 2 * learning + (total - frozen - learning)
  assert optax.global_norm(updates) > 0


def test_a_parameter_without_a_tower_is_an_error(config):
  with pytest.raises(ValueError, match="audio"):
    optimizers.labels(config, {"audio": jnp.zeros(3)})
