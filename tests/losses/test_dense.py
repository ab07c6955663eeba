"""The equations: values computed by hand, positives as a mask, ties, wrong arguments."""

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
    # cos 120° = −1/2 takes the place of cos 60°; cos 0° stays.
    ("l_softmax", (log1p_ratio([0], -2 * HALF) + log1p_ratio([2 * ROOT], 2)) / 2),
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


def test_every_name_is_offered():
  assert len(losses.names()) == len(set(losses.names())) == 10


@pytest.mark.parametrize(
  "arguments, says",
  [
    (dict(name="clip"), "'clip' is unknown.*symmetric.*contrastive"),
    (dict(name="snm", keep=0.0), r"keep=0.0 .*\(0, 1\]"),
    (dict(name="snm", keep=1.5), r"keep=1.5 .*\(0, 1\]"),
    (dict(name="snm", implementation="sparse"), "'sparse' is one of: dense"),
  ],
)
def test_wrong_arguments(arguments, says):
  with pytest.raises(ValueError, match=says):
    losses.get(**arguments)


def test_wrong_shapes():
  with pytest.raises(ValueError, match=r"\(3, 2\) and image \(4, 2\)"):
    losses.get("snm")(jnp.ones((3, 2)), jnp.ones((4, 2)))
