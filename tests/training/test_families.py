"""Towers beside BERT and ResNet train alike: frozen blocks, bf16, remat, micro-batches, shards."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import test_step
from xe_retrieval.towers import dual_encoder, families

TOWERS = [
  (encoder, name)
  for encoder, known in families.FAMILIES.items()
  for name in known
  if name != families.DEFAULT[encoder]  # whose steps test_step.py takes
]


@pytest.fixture
def config(config):
  for tower in (config.text, config.image):
    tower.optimizer, tower.learning_rate, tower.end_learning_rate = "sgd", 1.0, 1.0
    tower.warmup_steps, tower.weight_decay, tower.freeze = 0, 0.0, "1"
  config.text.layers, config.text.mlp = 2, 64
  config.image.patch, config.image.blocks, config.image.width = 8, 2, 16
  config.image.heads, config.image.mlp = 2, 64
  return config


@pytest.mark.parametrize(("encoder", "family"), TOWERS)
def test_gradients_of_every_family(config, encoder, family):
  """The same with remat, nearly the same in bfloat16; none of what is frozen."""
  config[encoder].family = family
  batch = test_step.batch(config)
  inputs = batch["tokens"][:4] if encoder == "text" else batch["image"][:4] / np.float32(255)
  towers = []
  for config.dtype, config.remat in [("float32", False), ("float32", True), ("bfloat16", False)]:
    towers.append(getattr(dual_encoder.from_config(config), encoder).tower)
  random = np.random.default_rng(0)
  params = jax.eval_shape(towers[0].init, jax.random.key(0), inputs)["params"]
  params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), params)

  def gradient(tower):
    return jax.grad(lambda p: jnp.square(tower.apply({"params": p}, inputs, train=True)).mean())

  plain, remat, half = jax.jit(lambda p: [gradient(tower)(p) for tower in towers])(params)
  for found in (plain, half):
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    fixed = [found["embeddings"], found["layer_0"]]
    assert not any(np.any(x) for x in jax.tree.leaves(fixed))
    assert np.any(found["layer_1"]["query"]["kernel"])
  largest = max(np.abs(x).max() for x in jax.tree.leaves(plain))
  chex.assert_trees_all_close(remat, plain, atol=1e-5 * largest)
  chex.assert_trees_all_close(half, plain, atol=0.05 * largest)
  kernel, rounded = (found["layer_1"]["mlp_out"]["kernel"] for found in (plain, half))
  assert np.any(rounded != kernel)


def test_memory_is_saved_without_other_results(config):
  config.text.family, config.image.family = "mpnet", "siglip"
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
