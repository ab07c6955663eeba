"""Bootstrap intervals and neighbour counts, against numbers worked out by hand."""

import numpy as np
import pytest

from xe_retrieval.evaluation import bootstrap, pair_counts, precision_recall


def test_neighbours_equal_to_counting():
  random = np.random.default_rng(0)
  text, image = random.standard_normal((70, 8)), random.standard_normal((333, 8))
  text, image = text.astype(np.float32), image.astype(np.float32)
  levels = np.float32([-2, 0, 0.5, 3])
  found = pair_counts.Matches(text, image, np.zeros(70, int)).count(levels=levels)
  scores = text @ image.T
  np.testing.assert_array_equal(found.counts, (scores[:, :, None] >= levels).sum(axis=1))
  np.testing.assert_allclose(found.top, -np.sort(-scores, axis=1)[:, :100], rtol=1e-6)
  np.testing.assert_array_equal(found.at(levels[1:3]).counts, found.counts[:, 1:3])


def test_intervals_cover_the_truth():
  # The share of successes of 400 coins, 100 times: 95 % intervals should hold 0.3 about 95 times.
  random = np.random.default_rng(1)
  draws = bootstrap.draw(np.arange(400), samples=300)
  held = 0
  for _ in range(100):
    low, high = bootstrap.mean(draws.text, random.random(400) < 0.3)
    held += low <= 0.3 <= high
  assert 88 <= held <= 100


def test_captions_of_one_image_are_drawn_together():
  draws = bootstrap.draw(np.array([0, 0, 2, 2, 2, 5]), samples=50)
  assert draws.image.shape == (50, 3)
  np.testing.assert_array_equal(draws.text[:, 0], draws.text[:, 1])
  np.testing.assert_array_equal(draws.text[:, [0, 2, 5]], draws.image)
  np.testing.assert_array_equal(draws.image.sum(axis=1), 3)


def test_median_of_each_sample():
  values = np.array([5, 1, 9, 3])
  draws = np.float32([[1, 1, 1, 1]] * 3)
  assert bootstrap.median(draws, values) == [4, 4]
  assert bootstrap.median(np.float32([[0, 3, 1, 0]] * 3), values) == [1, 1]


def test_resampled_curve_of_everything_is_the_curve():
  random = np.random.default_rng(2)
  image = random.standard_normal((60, 8)).astype(np.float32)
  text = image + random.standard_normal((60, 8)).astype(np.float32)
  curve = precision_recall.curve(text, image, np.arange(60))
  levels = bootstrap.levels(curve.own)
  seen = pair_counts.Matches(text, image, np.arange(60)).count(levels=levels)
  once = bootstrap.curves(seen, curve.own, np.ones((1, 60), np.float32))
  assert once.average_precision[0] == pytest.approx(curve.average_precision, abs=1e-6)
  np.testing.assert_array_equal(once.thresholds, curve.thresholds)
  np.testing.assert_allclose(once.precision[0], curve.precision, atol=1e-6)


def test_a_sample_that_returns_nothing_has_no_perfect_precision():
  # Two queries with their image at 0.9 and 0.1; the second one is drawn twice.
  counts, top = np.array([[2, 1], [2, 0]]), np.float32([[0.9], [0.5]])
  seen = pair_counts.PairCounts(None, None, np.float32([0.1, 0.9]), counts, top, 2)
  found = bootstrap.curves(seen, np.float32([0.9, 0.1]), np.float32([[0, 2], [1, 1]]))
  np.testing.assert_array_equal(found.thresholds, np.float32([0.9, 0.1]))
  np.testing.assert_allclose(found.precision, [[0, 0.5], [1, 0.5]])
  np.testing.assert_allclose(found.recall, [[0, 1], [0.5, 1]])
  np.testing.assert_allclose(found.average_precision, [0.5, 0.75])


def test_levels_are_scores_of_pairs(monkeypatch):
  own = np.random.default_rng(4).random(3000).astype(np.float32)
  np.testing.assert_array_equal(bootstrap.levels(own), np.sort(own))
  monkeypatch.setattr(bootstrap, "CELLS", 1)
  found = bootstrap.levels(own)
  assert found.dtype == np.float32 and len(found) == bootstrap.LEVELS
  assert {own.min(), own.max()} <= set(found) <= set(own)
