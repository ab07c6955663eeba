"""Shapes, names, freezing, precision and statistics of the two towers together."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from xe_retrieval.towers import dual_encoder, families

TOKENS = np.array(
  [[2, 5, 6, 3, 0, 0], [2, 7, 3, 0, 0, 0], [2, 8, 9, 10, 11, 3], [2, 4, 4, 3, 0, 0]]
)
SMALLER = {"text.layers": 1, "image.depths": (1,), "image.widths": (8,)}
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)


def build(config):
  """The jitted model and random variables, drawn by numpy: compiling model.init is slow."""
  model = dual_encoder.from_config(config)
  random = np.random.default_rng(0)

  def draw(path, leaf):
    values = random.normal(0, leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 0.1, leaf.shape)
    ones = path[-1].key in ("scale", "var")
    return jnp.array(np.abs(values + 1) if ones else values, leaf.dtype)

  shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS, IMAGES)
  variables = jax.tree_util.tree_map_with_path(draw, shapes)
  return jax.jit(model.apply, static_argnames=("train", "method", "mutable")), variables


def gradients(config):
  """Loss gradient and new statistics of one training pass."""
  config.text.dropout = 0.0
  apply, variables = build(config)

  def loss(params):
    (text, image), updates = apply(
      {**variables, "params": params}, TOKENS, IMAGES, train=True, mutable="batch_stats"
    )
    return jnp.sum(text * image), updates

  grads, updates = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
  return variables, grads, updates["batch_stats"]


def test_initial_values(tiny):
  model = dual_encoder.from_config(tiny(SMALLER))
  key = jax.random.key(0, impl="rbg")  # compiles faster than threefry
  variables = jax.jit(model.init)(key, TOKENS, IMAGES)
  text, image = (variables["params"][encoder]["tower"] for encoder in ("text", "image"))
  np.testing.assert_allclose(text["layer_0"]["mlp_in"]["kernel"].std(), 0.02, rtol=0.15)
  np.testing.assert_allclose(text["embeddings"]["word"]["embedding"].std(), 0.02, rtol=0.15)
  np.testing.assert_allclose(image["stem"]["conv"]["kernel"].std(), (2 / (49 * 8)) ** 0.5, rtol=0.2)
  assert not image["stem"]["norm"]["bias"].any() and not text["layer_0"]["query"]["bias"].any()
  stats = variables["batch_stats"]["image"]["tower"]["stem"]["norm"]
  assert (stats["mean"] == 0).all() and (stats["var"] == 1).all()
  chex.assert_trees_all_equal_shapes_and_dtypes(variables, build(tiny(SMALLER))[1])


def test_embeddings_and_names(tiny):
  apply, variables = build(tiny(SMALLER))
  text, image = apply(variables, TOKENS, IMAGES)
  chex.assert_shape([text, image], (4, 8))
  assert set(variables) == {"params", "batch_stats"}
  assert set(variables["params"]) == {"text", "image"}
  for encoder, width in (("text", 16), ("image", 8)):
    assert set(variables["params"][encoder]) == {"tower", "projection"}
    chex.assert_shape(variables["params"][encoder]["projection"]["kernel"], (width, 8))
    assert set(variables["params"][encoder]["projection"]) == {"kernel"}
  alone = apply(variables, TOKENS, method="embed_text")
  np.testing.assert_allclose(alone, text, atol=1e-6)
  alone = apply(variables, IMAGES, method="embed_image")
  np.testing.assert_allclose(alone, image, atol=1e-6)
  features = apply(variables, IMAGES, method="image_features")
  projected = features @ variables["params"]["image"]["projection"]["kernel"]
  np.testing.assert_allclose(projected, image, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_does_not_matter(tiny, pooling):
  apply, variables = build(tiny(SMALLER, **{"text.pooling": pooling}))
  long = apply(variables, TOKENS[1:2], method="embed_text")
  short = apply(variables, TOKENS[1:2, :3], method="embed_text")
  np.testing.assert_allclose(long, short, atol=1e-5)
  empty = apply(variables, np.zeros((1, 6), np.int32), method="embed_text")
  assert np.isfinite(empty).all()


@pytest.mark.parametrize("family", ["bert", "clip", "siglip"])
def test_pooled_token_alone_is_the_same(tiny, family):
  """The last layer computes only the token that is pooled: the first, the end, the last."""
  tower = dual_encoder.from_config(tiny(**{"text.family": family})).text.tower
  tower = tower.clone(eos=3, head=0)
  variables = tower.init(jax.random.key(0), TOKENS)
  every = tower.clone(pooling="mean", final_norm=False)
  keep = lambda module, _: module.name == "layer_1"  # noqa: E731
  _, state = every.apply(variables, TOKENS, capture_intermediates=keep, mutable="intermediates")
  last = state["intermediates"]["layer_1"]["__call__"][0]
  chex.assert_shape(last, (4, 6, 16))
  at = {"bert": 0, "clip": np.argmax(TOKENS == 3, axis=1), "siglip": -1}[family]
  found = tower.clone(final_norm=False).apply(variables, TOKENS)
  np.testing.assert_allclose(found, last[np.arange(4), at], atol=1e-5)


def test_features_of_chosen_layers():
  """First token and mean of the patches, of two layers, each normalised as the last is."""
  fields = dict(size=16, patch=8, blocks=3, width=16, heads=2, mlp=16, registers=2)
  fields = ConfigDict(dict(**fields, layers=(1, 3), pooling="cls_mean"))
  tower = families.FAMILIES["image"]["dinov2"].tower(fields, 0, jnp.float32, False)
  x = IMAGES.astype(np.float32) / 255
  variables = tower.init(jax.random.key(0), x)
  keep = lambda module, _: module.name in ("layer_0", "layer_2")  # noqa: E731
  found, state = tower.apply(variables, x, capture_intermediates=keep, mutable="intermediates")
  assert found.shape == (4, tower.feature_width()) == (4, 4 * 16)
  expected = []
  for layer in ("layer_0", "layer_2"):
    y = state["intermediates"][layer]["__call__"][0]  # [4, 1 + 2 + 4, 16]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    expected += [y[:, 0], y[:, 3:].mean(1)]
  np.testing.assert_allclose(found, np.concatenate(expected, axis=1), atol=1e-4)


def test_dropout_only_in_training(tiny):
  apply, variables = build(tiny(SMALLER))

  def embed(seed, train):
    rngs = {"dropout": jax.random.key(seed, impl="rbg")}
    return apply(variables, TOKENS, train=train, method="embed_text", rngs=rngs)

  np.testing.assert_array_equal(embed(1, False), embed(2, False))
  assert np.abs(embed(1, True) - embed(2, True)).max() > 1e-3


def test_bfloat16_keeps_parameters_statistics_and_outputs_in_float32(tiny):
  apply, variables = build(tiny(SMALLER, dtype="bfloat16"))
  exact, _ = build(tiny(SMALLER))
  outputs, updates = apply(variables, TOKENS, IMAGES, mutable="batch_stats")
  chex.assert_trees_all_equal_dtypes(
    (variables, outputs, updates),
    jax.tree.map(lambda x: x.astype(jnp.float32), (variables, outputs, updates)),
  )
  for low, high in zip(outputs, exact(variables, TOKENS, IMAGES), strict=True):
    np.testing.assert_allclose(low, high, atol=0.05 * np.abs(high).max())
    assert np.abs(low - high).max() > 0  # so it was computed in lower precision


def test_remat_changes_nothing(tiny):
  _, plain, _ = gradients(tiny(SMALLER))
  _, again, _ = gradients(tiny(SMALLER, remat=True))
  chex.assert_trees_all_close(plain, again, atol=1e-4)


def test_remat_keeps_less_for_the_backward_pass(tiny):
  def kept(config):
    config.text.dropout = 0.0
    model = dual_encoder.from_config(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS, IMAGES)

    def backward(params, stats):
      def forward(params):
        variables = {"params": params, "batch_stats": stats}
        return model.apply(variables, TOKENS, IMAGES, train=True, mutable="batch_stats")

      return jax.vjp(forward, params, has_aux=True)[1]  # a function whose leaves are the residuals

    held = jax.eval_shape(backward, variables["params"], variables["batch_stats"])
    return sum(x.size for x in jax.tree.leaves(held) if x.ndim > 2)

  deep = {"text.layers": 6, "image.depths": (4, 4)}
  assert kept(tiny(deep, remat=True)) < 0.4 * kept(tiny(deep))


def test_running_statistics_follow_the_batch(tiny):
  def train(config):
    apply, variables = build(config)
    _, updates = apply(variables, IMAGES, train=True, method="embed_image", mutable="batch_stats")
    return variables["batch_stats"], updates["batch_stats"]

  before, after = train(tiny(SMALLER))
  same = jax.tree.map(np.array_equal, before, after)
  assert not any(jax.tree.leaves(same))
  before, after = train(tiny(SMALLER, **{"image.batch_norm": "frozen"}))
  chex.assert_trees_all_equal(before, after)


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_sharded_batch_has_global_statistics(tiny, block):
  config = tiny(**{"image.block": block})
  apply, variables = build(config)
  images = np.concatenate([IMAGES, 255 - IMAGES])
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  one, eight = (
    apply(variables, x, train=True, method="embed_image", mutable="batch_stats")
    for x in (images, jax.device_put(images, sharding))
  )
  assert len(eight[0].devices()) == 8
  chex.assert_trees_all_close(one, eight, atol=1e-5)


@pytest.mark.parametrize("freeze", ["0", "1", "all"])
def test_frozen_parts_get_no_gradient_and_keep_statistics(tiny, freeze):
  config = tiny(**{"text.freeze": freeze, "image.freeze": freeze})
  variables, grads, stats = gradients(config)
  mask = dual_encoder.frozen(variables["params"], config)
  chex.assert_trees_all_equal_structs(mask, grads)

  def check(path, frozen, grad):
    if "key" in jax.tree_util.keystr(path[:-1]) and path[-1].key == "bias":
      return  # a key bias shifts all scores of a query alike, so its gradient is zero anyway
    assert frozen == (not np.any(grad)), jax.tree_util.keystr(path)

  jax.tree_util.tree_map_with_path(check, mask, grads)
  assert not mask["text"]["projection"]["kernel"] and not mask["image"]["projection"]["kernel"]
  same = jax.tree.map(lambda a, b: np.array_equal(a, b), stats, variables["batch_stats"])
  assert all(jax.tree.leaves(same["image"]["tower"]["stem"]))
  assert all(jax.tree.leaves(same["image"]["tower"]["stage_0_block_0"])) == (freeze != "0")
  assert all(jax.tree.leaves(same["image"]["tower"]["stage_1_block_0"])) == (freeze == "all")


def test_nothing_is_frozen_by_default(tiny):
  _, variables = build(tiny())
  assert not any(jax.tree.leaves(dual_encoder.frozen(variables["params"], tiny())))


def test_frozen_tower_training_output_is_its_evaluation_output(tiny):
  apply, variables = build(tiny(SMALLER, **{"text.freeze": "all", "image.freeze": "all"}))
  train = apply(variables, TOKENS, IMAGES, train=True)
  chex.assert_trees_all_equal(train, apply(variables, TOKENS, IMAGES))


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
def test_impossible_values_name_the_field(tiny, field, value, message):
  with pytest.raises(ValueError, match=message):
    dual_encoder.from_config(tiny(**{field: value}))


def test_too_many_tokens(tiny):
  apply, variables = build(tiny())
  with pytest.raises(ValueError, match="7 tokens per text, but only 6 positions"):
    apply(variables, np.ones((1, 7), np.int32), method="embed_text")


def test_dropout_of_features_has_its_rate_and_keeps_the_mean():
  x = jnp.ones((400, 203))  # a width that four does not divide
  for rate in (0.3, 0.7):
    kept = np.asarray(dual_encoder._dropout(jax.random.key(0), x, rate))
    assert len(np.unique(kept)) == 2 and kept.shape == x.shape
    assert np.mean(kept == 0) == pytest.approx(rate, abs=0.01)
    assert kept.mean() == pytest.approx(1, abs=0.02)
    assert np.abs(np.corrcoef((kept > 0).T)[0, 1:5]).max() < 0.2  # bytes of one word


def test_dropout_of_features_is_for_training_only(tiny):
  config = tiny(SMALLER)
  config.text.dropout, config.text.feature_dropout = 0.0, 0.5
  model = dual_encoder.from_config(config)
  _, variables = build(config)
  features = jnp.ones([64, config.text.width])
  embed = lambda train: model.apply(  # noqa: E731
    variables, features, train, method="project_text", rngs={"dropout": jax.random.key(1)}
  )
  kernel = variables["params"]["text"]["projection"]["kernel"]
  np.testing.assert_allclose(embed(False), features @ kernel, rtol=1e-5, atol=1e-6)
  dropped = embed(True)
  assert np.abs(dropped - dropped[0]).max() > 0  # each row drops different features
  np.testing.assert_allclose(dropped.mean(0), kernel.sum(0), atol=1.0)
