"""The joint encoder: shapes, masks, sharing between pairs, gradients, determinism."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from xe_retrieval.towers import dual_encoder, joint

B, K, N, T, PLACES = 3, 4, 5, 6, 9
ROWS = np.random.default_rng(1).integers(0, N, (B, K))


def config(**fields):
  settings = dict(
    streams="joint",
    layers=2,
    width=16,
    heads=2,
    mlp=24,
    compressed=4,
    first_input=False,
    dropout=0.0,
    input_dropout=0.0,
  )
  return ConfigDict({"joint": settings | fields, "dtype": "float32", "remat": False})


def inputs():
  random = np.random.default_rng(0)
  text = random.normal(size=(B, T, 10)).astype(np.float32)
  image = random.normal(size=(N, PLACES, 12)).astype(np.float32)
  known = np.arange(T) < np.array([[6], [3], [1]])
  first = random.normal(size=(B, K)).astype(np.float32)
  return text, known, image, ROWS, first


@functools.cache
def build(**fields):
  """The jitted model and variables drawn by NumPy, with logits that are not all 0."""
  model = joint.from_config(config(**fields))
  random = np.random.default_rng(0)

  def draw(path, leaf):
    values = random.normal(0, leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 0.1, leaf.shape)
    return jnp.array(values + (path[-1].key == "scale"), leaf.dtype)

  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs())
  params = jax.tree_util.tree_map_with_path(draw, shapes)
  return jax.jit(model.apply, static_argnames=("train", "method")), params


SETTINGS = [
  {"streams": streams, "compressed": count} for streams in joint.STREAMS for count in (0, 4)
]


@pytest.mark.parametrize("fields", SETTINGS)
def test_shapes_and_the_start_at_the_first_stages_ranking(fields):
  model = joint.from_config(config(**fields))
  params = jax.jit(model.init)(jax.random.key(0, impl="rbg"), *inputs())
  apply, _ = build(**fields)
  logits = apply(params, *inputs())
  chex.assert_shape(logits, (B, K))
  assert logits.dtype == jnp.float32 and not logits.any()
  stored = apply(params, inputs()[2], method="image_tokens")
  chex.assert_shape(stored, (N, fields["compressed"] or PLACES, 16))


@pytest.mark.parametrize("fields", SETTINGS)
def test_a_pair_does_not_depend_on_the_other_pairs(fields):
  apply, params = build(**fields)
  text, known, image, rows, first = inputs()
  logits = apply(params, *inputs())
  assert np.std(logits) > 0.01
  for b, k in np.ndindex(B, K):
    one = [slice(b, b + 1)] * 2
    picked = image[rows[b, k]][None]
    alone = apply(
      params, text[one[0]], known[one[1]], picked, np.zeros((1, 1), int), first[b : b + 1, k, None]
    )
    np.testing.assert_allclose(alone[0, 0], logits[b, k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("streams", joint.STREAMS)
def test_padding_does_not_matter_and_known_tokens_do(streams):
  apply, params = build(streams=streams)
  text, known, image, rows, first = inputs()
  logits = apply(params, *inputs())
  other = np.where(known[..., None], text, 9.0)
  np.testing.assert_allclose(apply(params, other, known, image, rows, first), logits, atol=1e-5)
  shorter = apply(params, text[1:, :3], known[1:, :3], image, rows[1:], first[1:])
  np.testing.assert_allclose(shorter, logits[1:], atol=1e-5)
  other = np.where((np.arange(T) == 2)[:, None], text[..., ::-1], text)
  changed = np.abs(apply(params, other, known, image, rows, first) - logits).max(axis=1)
  assert (changed[:2] > 1e-4).all() and changed[2] < 1e-5
  nothing = apply(params, text, np.zeros_like(known), image, rows, first)
  assert np.isfinite(nothing).all()


def test_the_first_stages_score_can_enter_the_logit():
  text, known, image, rows, first = inputs()
  for given in (False, True):
    apply, params = build(first_input=given)
    moved = apply(params, text, known, image, rows, first + 1) - apply(params, *inputs())
    assert (np.abs(moved).max() > 1e-3) == given


@pytest.mark.parametrize("fields", SETTINGS)
def test_gradients_reach_every_parameter_with_and_without_remat(fields):
  _, params = build(**fields)
  found = []
  for remat in (False, True)[: 1 + (fields["compressed"] > 0)]:
    settings = config(**fields)
    settings.remat = remat
    model = joint.from_config(settings)
    grads = jax.jit(jax.grad(lambda p, m=model: jnp.sum(m.apply(p, *inputs()) ** 2)))(params)
    found.append(jax.device_get(grads))
  chex.assert_trees_all_close(found[0], found[-1], rtol=1e-4, atol=1e-5)
  for path, leaf in jax.tree_util.tree_leaves_with_path(found[0]):
    assert np.abs(leaf).max() > 1e-9, jax.tree_util.keystr(path)


def test_dropout_is_of_training_and_follows_the_key():
  (apply, params), (plain, _) = build(dropout=0.5, input_dropout=0.5), build()

  def run(key):
    return apply(params, *inputs(), train=True, rngs={"dropout": jax.random.key(key)})

  np.testing.assert_array_equal(run(0), run(0))
  assert np.abs(run(0) - run(1)).max() > 1e-3
  np.testing.assert_array_equal(apply(params, *inputs()), plain(params, *inputs()))


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"streams": "three"}, "config.joint.streams='three': expected one of joint, two"),
    ({"width": 17}, "config.joint.width=17 is not divisible by config.joint.heads=2"),
    ({"layers": 0}, "config.joint.layers=0 should be at least 1"),
    ({"dropout": 1.0}, r"config.joint.dropout=1.0 should be a share in \[0, 1\)"),
  ],
)
def test_wrong_fields_are_named(fields, said):
  with pytest.raises(ValueError, match=said):
    joint.from_config(config(**fields))


TOKENS = np.array([[2, 5, 6, 3, 0, 0], [2, 7, 3, 0, 0, 0]])
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)


def test_the_towers_tokens_are_what_they_pool(tiny):
  settings = tiny({"text.pooling": "mean"})
  model = dual_encoder.from_config(settings)
  variables = jax.jit(model.init)(jax.random.key(0, impl="rbg"), TOKENS, PIXELS)
  whole = dual_encoder.unpooled(model)
  text = whole.apply(variables, TOKENS, method="text_tokens")
  mask = (TOKENS != 0)[..., None]
  pooled = (text * mask).sum(1) / mask.sum(1)
  features = model.apply(variables, TOKENS, method="text_features")
  np.testing.assert_allclose(pooled, features, rtol=1e-4, atol=1e-5)
  image = whole.apply(variables, PIXELS, method="image_tokens")
  features = model.apply(variables, PIXELS, method="image_features")
  assert image.ndim == 3
  np.testing.assert_allclose(image.mean(1), features, rtol=1e-4, atol=1e-5)
