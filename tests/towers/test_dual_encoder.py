"""Shapes, names, freezing, precision and statistics of the two towers together."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from xe_retrieval.towers import dual_encoder


def tiny(**changes):
  config = ConfigDict(
    dict(
      embedding_dim=8,
      dtype="float32",
      remat=False,
      text=dict(
        pretrained="",
        vocab_size=20,
        tokens=6,
        layers=2,
        width=16,
        heads=2,
        mlp=32,
        pooling="cls",
        dropout=0.1,
        freeze="none",
      ),
      image=dict(
        pretrained="",
        size=16,
        depths=(1, 1),
        widths=(8, 16),
        block="bottleneck",
        stem="small",
        stem_width=8,
        downsample_in_bottleneck=False,
        batch_norm="sync",
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        freeze="none",
      ),
    )
  )
  config.update_from_flattened_dict(changes)
  return config


TOKENS = np.array(
  [[2, 5, 6, 3, 0, 0], [2, 7, 3, 0, 0, 0], [2, 8, 9, 10, 11, 3], [2, 4, 4, 3, 0, 0]]
)
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)


def build(config):
  model = dual_encoder.from_config(config)
  return model, jax.jit(model.init)(jax.random.key(0), TOKENS, IMAGES)


def gradients(config):
  """Loss gradient and new statistics of one training pass."""
  model, variables = build(config)

  @jax.jit
  def grad(params):
    def loss(params):
      (text, image), updates = model.apply(
        {**variables, "params": params},
        TOKENS,
        IMAGES,
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": jax.random.key(1)},
      )
      return jnp.sum(text * image), updates

    return jax.grad(loss, has_aux=True)(params)

  grads, updates = grad(variables["params"])
  return variables, grads, updates["batch_stats"]


def test_embeddings_and_names():
  model, variables = build(tiny())
  text, image = model.apply(variables, TOKENS, IMAGES)
  chex.assert_shape([text, image], (4, 8))
  assert set(variables) == {"params", "batch_stats"}
  assert set(variables["params"]) == {"text", "image"}
  for encoder, width in (("text", 16), ("image", 16)):
    assert set(variables["params"][encoder]) == {"tower", "projection"}
    chex.assert_shape(variables["params"][encoder]["projection"]["kernel"], (width, 8))
    assert set(variables["params"][encoder]["projection"]) == {"kernel"}
  alone = model.apply(variables, TOKENS, method="embed_text")
  np.testing.assert_allclose(alone, text, atol=1e-6)
  alone = model.apply(variables, IMAGES, method="embed_image")
  np.testing.assert_allclose(alone, image, atol=1e-6)
  features = model.apply(variables, IMAGES, method="image_features")
  projected = features @ variables["params"]["image"]["projection"]["kernel"]
  np.testing.assert_allclose(projected, image, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_does_not_matter(pooling):
  model, variables = build(tiny(**{"text.pooling": pooling}))
  long = model.apply(variables, TOKENS[1:2], method="embed_text")
  short = model.apply(variables, TOKENS[1:2, :3], method="embed_text")
  np.testing.assert_allclose(long, short, atol=1e-5)
  empty = model.apply(variables, np.zeros((1, 6), np.int32), method="embed_text")
  assert np.isfinite(empty).all()


def test_dropout_only_in_training():
  model, variables = build(tiny())

  def embed(seed, train):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply(variables, TOKENS, train=train, method="embed_text", rngs=rngs)

  np.testing.assert_array_equal(embed(1, False), embed(2, False))
  assert np.abs(embed(1, True) - embed(2, True)).max() > 1e-3


def test_bfloat16_keeps_parameters_statistics_and_outputs_in_float32():
  model, variables = build(tiny(dtype="bfloat16"))
  exact, _ = build(tiny())
  outputs, updates = model.apply(variables, TOKENS, IMAGES, mutable=["batch_stats"])
  chex.assert_trees_all_equal_dtypes(
    (variables, outputs, updates),
    jax.tree.map(lambda x: x.astype(jnp.float32), (variables, outputs, updates)),
  )
  for low, high in zip(outputs, exact.apply(variables, TOKENS, IMAGES), strict=True):
    np.testing.assert_allclose(low, high, atol=0.05 * np.abs(high).max())
    assert np.abs(low - high).max() > 0  # it did compute in less precision


def test_remat_changes_nothing():
  _, plain, _ = gradients(tiny())
  _, again, _ = gradients(tiny(remat=True))
  chex.assert_trees_all_close(plain, again, atol=1e-4)


def test_running_statistics_follow_the_batch():
  _, _, stats = gradients(tiny())
  moved = jax.tree.map(lambda x: float(np.abs(x).max()), stats["image"]["tower"]["stem"]["norm"])
  assert moved["mean"] > 0
  variables, _, stats = gradients(tiny(**{"image.batch_norm": "frozen"}))
  chex.assert_trees_all_equal(stats, variables["batch_stats"])


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_sharded_batch_has_global_statistics(block):
  config = tiny(**{"image.block": block})
  model, variables = build(config)
  images = np.concatenate([IMAGES, 255 - IMAGES])
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  apply = jax.jit(
    lambda x: model.apply(variables, x, train=True, method="embed_image", mutable=["batch_stats"])
  )
  chex.assert_trees_all_close(apply(images), apply(jax.device_put(images, sharding)), atol=1e-5)


@pytest.mark.parametrize("freeze", ["0", "1", "all"])
def test_frozen_parts_get_no_gradient_and_keep_statistics(freeze):
  config = tiny(**{"text.freeze": freeze, "image.freeze": freeze})
  variables, grads, stats = gradients(config)
  mask = dual_encoder.frozen(variables["params"], config)
  chex.assert_trees_all_equal_structs(mask, grads)

  def check(path, frozen, grad):
    if "key" in jax.tree_util.keystr(path[:-1]) and path[-1].key == "bias":
      return  # a bias of the keys shifts all scores of a query alike: its gradient is zero anyway
    assert frozen == (not np.any(grad)), jax.tree_util.keystr(path)

  jax.tree_util.tree_map_with_path(check, mask, grads)
  assert not mask["text"]["projection"]["kernel"] and not mask["image"]["projection"]["kernel"]
  same = jax.tree.map(lambda a, b: np.array_equal(a, b), stats, variables["batch_stats"])
  assert all(jax.tree.leaves(same["image"]["tower"]["stem"]))
  assert all(jax.tree.leaves(same["image"]["tower"]["stage_0_block_0"])) == (freeze != "0")
  assert all(jax.tree.leaves(same["image"]["tower"]["stage_1_block_0"])) == (freeze == "all")


def test_nothing_is_frozen_by_default():
  _, variables = build(tiny())
  assert not any(jax.tree.leaves(dual_encoder.frozen(variables["params"], tiny())))


def test_frozen_tower_training_output_is_its_evaluation_output():
  model, variables = build(tiny(**{"text.freeze": "all", "image.freeze": "all"}))
  train = model.apply(variables, TOKENS, IMAGES, train=True)
  chex.assert_trees_all_equal(train, model.apply(variables, TOKENS, IMAGES))


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("text.freeze", "3", r"config.text.freeze='3': expected 'none', 'all' or .* 0..2"),
    ("image.freeze", "some", r"config.image.freeze='some'.* 0..2"),
    ("image.block", "wide", "config.image.block='wide': expected one of bottleneck, basic"),
    ("text.pooling", "max", "config.text.pooling='max': expected one of cls, mean"),
    ("dtype", "float16", "config.dtype='float16': expected one of float32, bfloat16"),
    ("text.heads", 3, "config.text.width=16 is not divisible by heads=3"),
  ],
)
def test_impossible_values_name_the_field(field, value, message):
  with pytest.raises(ValueError, match=message):
    dual_encoder.from_config(tiny(**{field: value}))


def test_too_many_tokens():
  model, variables = build(tiny())
  with pytest.raises(ValueError, match="7 tokens per text, but only 6 positions"):
    model.apply(variables, np.ones((1, 7), np.int32), method="embed_text")
