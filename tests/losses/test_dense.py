"""The equations: values computed by hand, positives as a mask, ties, wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xe_retrieval import losses


@pytest.mark.parametrize(
  "name, value",
  [
    ("sampled_softmax", 6.2383),  # log(1 + 511)
    ("snm", 5.5491),  # log(1 + 256)
    ("cross_example_softmax", 12.4747),  # log(1 + 512·511)
    ("cross_example_negative_mining", 11.7816),  # log(1 + 512·511 / 2)
    ("corrected_cross_example_softmax", 12.4747),  # every score is lowered by the same number
    ("symmetric", 6.2383),
  ],
)
def test_all_scores_equal(name, value):
  x = jnp.ones((512, 4))
  np.testing.assert_allclose(losses.get(name)(x, x), value, atol=5e-5)


# Two pairs at 60° and 0°; text 0 and image 1 are at 90°, text 1 and image 0 at 30°.
TEXT = np.array([[1.0, 0.0], [0.0, 2.0]])
IMAGE = np.array([[0.5, 0.75**0.5], [0.0, 3.0]])
HALF, ROOT = 0.5, 0.75**0.5


def log1p_ratio(negatives, positive):
  return np.log1p(np.sum(np.exp(negatives)) / np.exp(positive))


@pytest.mark.parametrize(
  "name, value",
  [
    ("sampled_softmax", (log1p_ratio([0], 2 * HALF) + log1p_ratio([2 * ROOT], 2)) / 2),
    ("snm", (log1p_ratio([0], 2 * HALF) + log1p_ratio([2 * ROOT], 2)) / 2),
    # cos 120° = −1/2 for cos 60° = 1/2, softened (5/2 − 1/2) / 6 = 1/3; cos 0° stays.
    ("l_softmax", (log1p_ratio([0], 2 / 3) + log1p_ratio([2 * ROOT], 2)) / 2),
    # 4·60° = 240°, q = 1: ψ = −cos 240° − 2 = −3/2, softened (5/2 − 3/2) / 6 = 1/6.
    ("a_softmax", (log1p_ratio([0], 2 / 6) + log1p_ratio([2 * ROOT], 2)) / 2),
    (
      "cross_example_softmax",
      (log1p_ratio([0, 2 * ROOT], 2 * HALF) + log1p_ratio([0, 2 * ROOT], 2)) / 2,
    ),
    (
      "cross_example_negative_mining",
      (log1p_ratio([2 * ROOT], 2 * HALF) + log1p_ratio([2 * ROOT], 2)) / 2,
    ),
    # With one negative per row and column, r = (0, 2·ROOT), c = (2·ROOT, 0): both negatives are 0.
    (
      "corrected_cross_example_softmax",
      (log1p_ratio([0, 0], 1 - ROOT) + log1p_ratio([0, 0], 2 - ROOT)) / 2,
    ),
    (
      "corrected_cross_example_negative_mining",
      (log1p_ratio([0], 1 - ROOT) + log1p_ratio([0], 2 - ROOT)) / 2,
    ),
    # The positive of 1/2 is 0.4 below 0.9, the negative of ROOT is above 0.5.
    (
      "tcm",
      (log1p_ratio([0], 2 * HALF) + log1p_ratio([2 * ROOT], 2)) / 2 + 0.4 + (ROOT - 0.5),
    ),
    (
      "symmetric",
      (log1p_ratio([0], 1) + log1p_ratio([2 * ROOT], 2)) / 4
      + (log1p_ratio([2 * ROOT], 1) + log1p_ratio([0], 2)) / 4,
    ),
    (
      "sigmoid",
      (log1p_ratio([0], 1 - 10) + log1p_ratio([0], 2 - 10)) / 2
      + (log1p_ratio([0], 10) + log1p_ratio([2 * ROOT], 10)) / 2,
    ),
    ("triplet", (0 + (0.4 + 2 * ROOT - 2)) / 2),  # 0.4 + 0 − 1 < 0
    ("contrastive", (1 + 0) / 2 + (0 + 2 * ROOT - 0.4) / 2),
  ],
)
def test_two_pairs(name, value):
  loss = losses.get(name, scale=2.0)
  np.testing.assert_allclose(loss(jnp.array(TEXT), jnp.array(IMAGE)), value, rtol=1e-6)


def test_a_row_that_shares_an_id_is_no_negative():
  x = jnp.ones((6, 3))
  text_id, image_id = jnp.array([0, 0, 1, 2, 3, 4]), jnp.array([0, 1, 2, 2, 3, 4])
  # 30 ordered pairs, less (0, 1), (1, 0) by text and (2, 3), (3, 2) by image.
  value = losses.get("cross_example_softmax")(x, x, text_id, image_id)
  np.testing.assert_allclose(value, np.log(1 + 26), rtol=1e-6)
  value = losses.get("cross_example_negative_mining")(x, x, text_id, image_id)
  np.testing.assert_allclose(value, np.log(1 + 13), rtol=1e-6)
  value = losses.get("cross_example_softmax")(x, x, text_id=text_id)
  np.testing.assert_allclose(value, np.log(1 + 28), rtol=1e-6)


def test_live_scalars_replace_the_numbers_of_get():
  loss = losses.get("l_softmax", scale=3.0)
  value = loss(jnp.array(TEXT), jnp.array(IMAGE), scale=2.0, softening=0.0)
  hard = (log1p_ratio([0], -2 * HALF) + log1p_ratio([2 * ROOT], 2)) / 2  # no plain cosine left
  np.testing.assert_allclose(value, hard, rtol=1e-6)
  with pytest.raises((TypeError, ValueError), match="temperature"):
    loss(jnp.array(TEXT), jnp.array(IMAGE), temperature=2.0)


def test_a_correction_of_0_is_the_plain_loss():
  x, y = np.random.default_rng(0).normal(size=(2, 16, 4))
  plain = losses.get("cross_example_softmax")(x, y)
  assert losses.get("corrected_cross_example_softmax", correction=0.0)(x, y) == plain
  half = losses.get("corrected_cross_example_softmax", corrected_share=0.5)(x, y)
  whole = losses.get("corrected_cross_example_softmax")(x, y)
  np.testing.assert_allclose(half, (whole + plain) / 2, rtol=1e-6)


def test_every_name_is_offered():
  assert len(losses.names()) == len(set(losses.names())) == 13


@pytest.mark.parametrize(
  "arguments, says",
  [
    (dict(name="clip"), "'clip' is unknown.*symmetric.*contrastive"),
    (dict(name="snm", keep=0.0), r"keep=0.0 .*\(0, 1\]"),
    (dict(name="snm", keep=1.5), r"keep=1.5 .*\(0, 1\]"),
    (dict(name="snm", correction=1.5), r"correction=1.5 .*\[0, 1\]"),
    (dict(name="snm", corrected_share=0.0), r"corrected_share=0.0 .*\(0, 1\]"),
    (dict(name="snm", implementation="sparse"), "'sparse' is one of: dense"),
  ],
)
def test_wrong_arguments(arguments, says):
  with pytest.raises(ValueError, match=says):
    losses.get(**arguments)


def test_wrong_shapes():
  with pytest.raises(ValueError, match=r"\(3, 2\) and image \(4, 2\)"):
    losses.get("snm")(jnp.ones((3, 2)), jnp.ones((4, 2)))


@pytest.mark.parametrize("name", ["cross_example_negative_mining", "snm"])
def test_mining_among_more_pairs_than_32_bits_count_is_refused(name):
  loss = losses.get(name)
  fits, too_many = (jax.ShapeDtypeStruct((n, 2), jnp.float32) for n in (46_340, 46_341))
  jax.eval_shape(loss, fits, fits)
  if name == "snm":  # counts by row
    jax.eval_shape(loss, too_many, too_many)
    return
  with pytest.raises(ValueError, match="46,341² pairs of a batch takes implementation='streaming'"):
    jax.eval_shape(loss, too_many, too_many)
