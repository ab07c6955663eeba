"""The lower bound of a precision: how often it holds, by simulation."""

import numpy as np
import pytest
from scipy import stats

from tests.calibration.conftest import counted, pairs_with
from xe_retrieval.calibration import bounds, fitting
from xe_retrieval.calibration import counts as counting
from xe_retrieval.calibration.calibrator import Calibrator, Queries

DRAWS = 1000


def lower_bounds(right):
  """bool [draws, groups, pairs of a group] -> 90 % bounds, float [draws]."""
  r = right.sum(axis=2).astype(float)
  t = np.full(r.shape, right.shape[2])
  squares = np.stack([(r * r).sum(1), (r * t).sum(1), (t * t).sum(1), (t * t).sum(1)])
  return bounds.precision(r.sum(1), t.sum(1), squares, 0.9)


@pytest.mark.parametrize("pairs", [30, 300, 3000])
@pytest.mark.parametrize("precision", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("same", [None, 0.0, 0.5, 1.0])
def test_the_bound_holds_as_often_as_it_says(pairs, precision, same):
  """`same` is the share of images whose five pairs are all right or all wrong; None: no images."""
  random = np.random.default_rng(pairs)
  size = 1 if same is None else 5
  right = random.random((DRAWS, pairs // size, size)) < precision
  alike = random.random(right.shape[:2]) < (same or 0)
  right = np.where(alike[:, :, None], right[:, :, :1], right)
  low = lower_bounds(right)
  assert np.mean(low <= precision) >= 0.9 - 2.5 * np.sqrt(0.09 / DRAWS)
  if pairs == 3000:
    assert np.mean(low) > precision - (0.03 if same is None else 0.04)


def test_equal_to_clopper_and_pearson_for_independent_pairs():
  found = bounds.precision([20], [30], np.array([[20.0], [20], [30], [30]]), 0.9)[0]
  assert stats.binom.sf(19, 30, found) == pytest.approx(0.1)
  everything = bounds.precision([30], [30], np.array([[30.0], [30], [30], [30]]), 0.9)[0]
  assert everything == pytest.approx(0.1 ** (1 / 30))


def test_nothing_returned_promises_nothing():
  np.testing.assert_array_equal(bounds.precision([0, 0], [0, 7], np.zeros((4, 2)), 0.9), 0)


def test_images_that_agree_are_worth_one_pair_each():
  """50 images with 5 right pairs each, 50 with 5 wrong ones: like 50 of 100, not 250 of 500."""
  r, t = np.repeat([5.0, 0.0], 50), np.full(100, 5.0)
  squares = np.array([[(r * r).sum()], [(r * t).sum()], [(t * t).sum()], [(t * t).sum()]])
  single = bounds.precision([50], [100], np.array([[50.0], [50], [100], [100]]), 0.9)
  np.testing.assert_allclose(bounds.precision([250], [500], squares, 0.9), single)


@pytest.mark.parametrize("same", [False, True])
def test_a_guaranteed_threshold_keeps_its_precision(same):
  """Chosen on each of 150 draws and judged by the true precision, although many levels are tried.

  P(right | z) is the logistic function; with `same`, the pairs of an image share their luck.
  """
  random = np.random.default_rng(0)
  z = np.sort(random.normal(0, 2, 400_000))[::-1]
  tail = np.cumsum(1 / (1 + np.exp(-z))) / np.arange(1, len(z) + 1)
  images, captions = 200, 5
  image = np.repeat(np.arange(images), captions)
  about = dict(images=100, positives=len(image))
  kept = {0.5: [], 0.8: []}
  for _ in range(150):
    z_ = random.normal(0, 2, len(image))
    luck = random.random(images)[image] if same else random.random(len(image))
    right = luck < 1 / (1 + np.exp(-z_))
    counts = counted(z_, right, image, np.arange(images), **about)
    for target, found in kept.items():
      chosen = counts.at_precision(target, 100, guarantee=True)
      if chosen is not None:
        found.append(tail[np.searchsorted(-z, -chosen, side="right") - 1] >= target)
  for found in kept.values():
    assert len(found) > 90
    assert np.mean(found) >= 0.9 - 2.5 * np.sqrt(0.09 / len(found))


def test_the_bound_holds_where_some_images_are_near_to_every_caption():
  """Images and captions are drawn anew each time; a few images are returned for everything."""
  random = np.random.default_rng(1)
  images, draws, level = 40, 150, np.searchsorted(counting.LEVELS, 0)
  queries = Queries(*np.zeros((3, 5 * images)))
  straight = Calibrator(np.array([]), [(np.array([0.0, 1]), np.array([-10.0, 10]))], np.array([]))
  found, low, rows_only = [], [], []
  for _ in range(draws):
    topic = random.integers(0, 8, images)
    right = topic[np.repeat(np.arange(images), 5), None] == topic
    near = 0.15 * random.standard_exponential(images)
    scores = random.normal(np.where(right, 0.5, 0.1) + near, 0.1)
    pairs, gallery, source = pairs_with(scores, right)
    counts = fitting.count(pairs, gallery, source, queries, straight)
    found.append((counts.relevant[level], counts.irrelevant[level]))
    low.append(counts.lower_bound(images)[level])
    passed = scores >= 0.5
    r, t = (x.reshape(images, -1).sum(1) for x in (right & passed, passed))
    squares = np.array([[r @ r], [r @ t], [t @ t], [t @ t]], float)
    rows_only.append(bounds.precision([r.sum()], [t.sum()], squares, 0.9)[0])
  relevant, irrelevant = np.sum(found, axis=0)
  precision = relevant / (relevant + irrelevant)
  assert np.mean(np.array(low) <= precision) >= 0.9 - 2.5 * np.sqrt(0.09 / draws)
  assert np.mean(np.array(rows_only) <= precision) < 0.8  # as if only captions were drawn
  assert np.mean(low) > precision - 0.3
