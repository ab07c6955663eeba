"""Thresholds, bootstrap intervals and calibration, against numbers worked out by hand."""

import numpy as np
import pytest

from xe_retrieval.evaluation import (
  bootstrap,
  calibration,
  neighbour_counts,
  precision_recall,
  thresholds,
)

# Sorted pairs: 0.9+ 0.8+ 0.7- 0.6+ 0.5- 0.4- 0.3+ 0.2- (others negative)
CURVE = precision_recall.Curve(
  thresholds=np.float32([0.9, 0.8, 0.6, 0.3]),
  true=np.array([1, 2, 3, 4]),
  returned=np.array([1, 2, 4, 7]),
  positives=4,
  pairs=16,
)


def test_lowest_threshold_with_the_precision():
  found = thresholds.at_precision(CURVE, 0.75)
  assert (found.threshold, found.precision, found.recall) == (np.float32(0.6), 0.75, 0.75)
  assert (found.returned, found.true) == (4, 3)
  assert thresholds.at_precision(CURVE, 0.76).threshold == np.float32(0.8)
  low = precision_recall.Curve(np.float32([0.5]), np.array([1]), np.array([4]), 1, 8)
  assert thresholds.at_precision(low, 0.5) is None


def test_best_f1():
  # F1 = 2·true/(returned + 4): 0.4, 2/3, 0.75, 8/11
  found = thresholds.best_f1(CURVE)
  assert found.threshold == np.float32(0.6)
  assert found.f1 == pytest.approx(0.75)


def test_table_says_what_is_out_of_reach():
  low = precision_recall.Curve(np.float32([0.5]), np.array([1]), np.array([4]), 1, 8)
  row = thresholds.table(low, np.array([0.5]), None, targets=(0.5,))[0]
  assert row == {"target_precision": 0.5, "threshold": None, "best_precision": 0.25}


def test_profiles_equal_to_counting():
  random = np.random.default_rng(0)
  text, image = random.standard_normal((70, 8)), random.standard_normal((333, 8))
  text, image = text.astype(np.float32), image.astype(np.float32)
  levels = np.float32([-2, 0, 0.5, 3])
  found = neighbour_counts.profiles(text, [image[:100], image[100:]], levels)
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
  own = np.arange(60)
  curve = precision_recall.curve(text, image, own)
  scores = np.sort(curve.thresholds)
  seen = neighbour_counts.profiles(text, [image], scores)
  # own scores as the curve has them
  positive = np.float32([(text[i : i + 1] @ image[i : i + 1].T)[0, 0] for i in range(60)])
  positive = scores[np.abs(scores[:, None] - positive).argmin(axis=0)]
  once = bootstrap.curves(seen, positive, np.ones((1, 60), np.float32))
  assert once.average_precision[0] == pytest.approx(curve.average_precision, abs=1e-6)
  np.testing.assert_allclose(once.precision[0], curve.precision, atol=1e-6)
  best = thresholds.at_precision(curve, 0.5)
  assert once.threshold_interval(0.5) == pytest.approx([best.threshold] * 2)


def test_score_that_each_query_needs():
  top = np.float32([[0.9, 0.5, 0.4], [0.8, 0.7, 0.1], [0.3, 0.2, 0.1]])
  seen = neighbour_counts.Profiles(np.float32([0]), np.full((3, 1), 3), top)
  ranks = np.array([0, 1, 2])
  # At 50 % two images may be returned; the third query's image is not among its first two.
  np.testing.assert_array_equal(
    calibration.needed_scores(seen, ranks, 0.5), np.float32([0.5, 0.7, np.nan])
  )
  needed = calibration.needed_scores(seen, ranks, 0.9)
  np.testing.assert_array_equal(needed, np.float32([0.9, np.nan, np.nan]))
  row = calibration.against_global(np.array([0.5, 0.7, np.nan]), 0.6)
  assert row["reachable"] == pytest.approx(200 / 3)
  assert row["above_global"] == 50
  assert calibration.against_global(np.array([np.nan]), 0.6) == {"reachable": 0.0}


def test_threshold_of_a_homogeneous_set_keeps_its_promise():
  # Every query has its image at a score drawn from one law, and ten others from another.
  random = np.random.default_rng(3)
  own = random.normal(0.6, 0.1, 2000).astype(np.float32)
  others = random.normal(0.3, 0.1, (2000, 10)).astype(np.float32)
  levels = bootstrap.levels(own)
  scores = np.concatenate([own[:, None], others], axis=1)
  counts = (scores[:, :, None] >= levels).sum(axis=1)
  seen = neighbour_counts.Profiles(levels, counts, -np.sort(-scores, axis=1))
  targets = np.array([0.5, 0.8, 0.9])
  had = calibration.reliability(seen, own, targets)
  np.testing.assert_allclose(np.nanmedian(had, axis=1), targets, atol=0.03)


def test_levels_hold_the_chosen_thresholds(monkeypatch):
  monkeypatch.setattr(bootstrap, "CELLS", 1)
  own = np.random.default_rng(4).random(3000).astype(np.float32)
  found = bootstrap.levels(own, own[[7, 8]])
  assert found.dtype == np.float32 and (np.diff(found) > 0).all()
  assert len(found) <= bootstrap.LEVELS + 2
  assert {own.min(), own.max(), own[7], own[8]} <= set(found)
