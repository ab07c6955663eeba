"""Towers beside BERT and ResNet train alike: frozen blocks, bf16, remat, micro-batches, shards."""

import jax
import numpy as np
import pytest

from tests.training import test_step
from xe_retrieval.towers import dual_encoder

PAIRS = [("mpnet", "dinov2"), ("siglip", "clip")]


@pytest.fixture
def config(config):
  for tower in (config.text, config.image):
    tower.optimizer, tower.learning_rate, tower.end_learning_rate = "sgd", 1.0, 1.0
    tower.warmup_steps, tower.weight_decay, tower.freeze = 0, 0.0, "1"
  config.text.layers, config.text.mlp = 2, 64
  config.image.patch, config.image.blocks, config.image.width = 8, 2, 16
  config.image.heads, config.image.mlp = 2, 64
  return config


@pytest.mark.parametrize(("text", "image"), PAIRS)
def test_memory_is_saved_without_other_results(config, text, image):
  config.text.family, config.image.family = text, image
  before, plain, expected = test_step.take(config)
  frozen = dual_encoder.frozen(before["params"], config)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before["params"], plain.params)
  for encoder in ("text", "image"):
    fixed, learns = (frozen[encoder]["tower"], moved[encoder]["tower"])
    assert all(jax.tree.leaves([fixed["embeddings"], fixed["layer_0"]]))
    assert not any(jax.tree.leaves([learns["embeddings"], learns["layer_0"]]))
    assert not any(jax.tree.leaves(fixed["layer_1"]))
    assert learns["layer_1"]["mlp_out"]["kernel"] and learns["layer_1"]["query"]["kernel"]

  config.remat, config.micro_batch, config.mesh.shard_parameters = True, 8, True
  _, saving, metrics = test_step.take(config, devices=4)
  kernel = saving.params["text"]["tower"]["layer_1"]["mlp_in"]["kernel"]  # [16, 64]
  assert kernel.addressable_shards[0].data.shape == (16, 16)
  plain, saving = jax.device_get((plain, saving))
  test_step.assert_close(saving.params, plain.params, before["params"])
  np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)


def test_bfloat16_computes_and_float32_is_kept(config):
  config.text.family, config.image.family = PAIRS[0]
  _, _, expected = test_step.take(config)
  config.dtype = "bfloat16"
  _, state, metrics = test_step.take(config)
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
  np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=0.05)
  assert metrics["loss"] != expected["loss"]
