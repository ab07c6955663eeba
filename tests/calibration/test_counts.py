"""Counts at one size of the gallery → precision and thresholds at another."""

import dataclasses
import json

import numpy as np
import pytest

from tests.calibration.conftest import counted, pairs_with, two_normals
from xe_retrieval.calibration import fitting, promises
from xe_retrieval.calibration.artifact import Meaning
from xe_retrieval.calibration.calibrator import Queries
from xe_retrieval.calibration.counts import LEVELS, Counts

# As under the pairing; as if any image could be relevant; as by captions: the own one and others.
KINDS = {"count": (0.0, True), "share": (0.04, False), "both": (0.005, True)}


def test_by_hand():
  # Two queries. z of relevant pairs: 3 and 1; of irrelevant ones: 2, 0, 0, 0.
  z = np.array([3.0, 2, 0, 1, 0, 0])
  right = np.array([1, 0, 0, 1, 0, 0], bool)
  query = np.array([0, 0, 0, 1, 1, 1])
  counts = counted(z, right, query, np.arange(2), images=3, positives=2)
  at = np.searchsorted(LEVELS, [0, 0.5, 1, 2, 2.5, 3.5])
  assert counts.relevant[at].tolist() == [2, 2, 2, 1, 1, 0]
  assert counts.irrelevant[at].tolist() == [4, 1, 1, 1, 0, 0]
  assert counts.answered[at].tolist() == [2, 2, 2, 1, 1, 0]
  # Query 0 has r = 1, t = 2 from 0.5 on, query 1 has r = 1, t = 1.
  assert counts.squares[:, at[1]].tolist() == [2, 3, 5, 5]
  # One relevant image of each query: 2 irrelevant ones among 3 images, 20 among 21.
  np.testing.assert_allclose(counts.shifts(21), -np.log(10), atol=1e-6)
  assert counts.shifts(3) == pytest.approx(0, abs=1e-6)
  np.testing.assert_allclose(counts.precision(21)[at], [2 / 42, 1 / 6, 1 / 6, 1 / 11, 1, np.nan])
  np.testing.assert_allclose(counts.wrong(21)[at], [20, 5, 5, 5, 0, 0])
  np.testing.assert_allclose(counts.returned(21)[at], [21, 6, 6, 5.5, 0.5, 0])
  # Any image is as likely to be relevant: 7 of 21, as 1 of 3.
  share = dataclasses.replace(counts, own=0 * counts.own)
  assert share.shifts(21) == pytest.approx(0, abs=1e-6)
  np.testing.assert_allclose(share.precision(21)[at], counts.precision(3)[at])
  np.testing.assert_allclose(share.wrong(21)[at], [14, 3.5, 3.5, 3.5, 0, 0])
  np.testing.assert_allclose(share.returned(21)[at], [21, 10.5, 10.5, 7, 3.5, 0])


def test_queries_of_one_image_are_one_group():
  z, right, query = np.zeros(4), np.array([True, True, False, False]), np.arange(4)
  about = dict(images=2, positives=4)
  apart = counted(z, right, query, np.arange(4), **about)
  together = counted(z, right, query, np.array([7, 7, 9, 9]), **about)
  level = np.searchsorted(LEVELS, 0)
  assert apart.squares[:, level].tolist() == [2, 2, 4, 4]
  assert together.squares[:, level].tolist() == [4, 4, 8, 8]
  assert (apart.relevant == together.relevant).all()


@pytest.fixture(scope="module", params=KINDS)
def sizes(request):
  """What is fitted on 100 images, and pairs of 700 from the same laws."""
  random = np.random.default_rng(3)
  none = Queries(*np.zeros((3, 2000)))
  made = []
  for images in (100, 700):
    made.append(pairs_with(*two_normals(random, 2000, images, *KINDS[request.param])))
  calibrator, counts = fitting.fit(*made[0], none)
  return Meaning("pairing", calibrator, counts), *made[1], none, request.param


def test_probabilities_stay_true_in_a_larger_collection(sizes):
  meaning, pairs, gallery, source, queries, kind = sizes
  right = source.matrix(source.queries, 0)
  found = {}
  for images in (100, 700):  # as if it still were 100; as it is
    shown = meaning.probability(meaning.calibrator.logit(pairs.text, queries), images)
    best = np.argsort(-pairs.text, axis=1)[:, : promises.TOP]
    top = (np.take_along_axis(x, best, axis=1).ravel() for x in (shown, right))
    found[images] = promises.reliability(*top)["ece"]
  assert found[700] < 0.02
  if kind == "count":
    assert found[100] > 0.1


def test_promises_hold_in_a_larger_collection(sizes):
  meaning, pairs, gallery, source, queries, kind = sizes
  here = fitting.count(pairs, gallery, source, queries, meaning.calibrator)
  assert here.images == 700
  for target in (0.3, 0.5, 0.7):
    level = meaning.counts.at_precision(target, 700)
    i = np.searchsorted(LEVELS, level)
    # One relevant image: 0.7 among 700 images is 0.94 among 100: few pairs say where that begins.
    assert here.precision(700)[i] == pytest.approx(target, abs=0.05 if target < 0.7 else 0.1)
    expect = meaning.counts.expect(level, 700)
    assert here.wrong(700)[i] == pytest.approx(expect["wrong_per_query"], rel=0.25, abs=0.1)
    assert here.returned(700)[i] == pytest.approx(expect["results_per_query"], rel=0.25)
    assert expect["recall"] == pytest.approx(here.relevant[i] / here.positives, abs=0.05)
  for most in (0.1, 1.0, 10.0):
    i = np.searchsorted(LEVELS, meaning.counts.at_wrong(most, 700))
    assert here.wrong(700)[i] == pytest.approx(most, rel=0.25)


def test_expectation_agrees_with_the_curves(sizes):
  counts = sizes[0].counts
  for i in (200, 240, 260):
    found = counts.expect(LEVELS[i], 700)
    assert found["precision"] == counts.precision(700)[i]
    assert found["precision_at_least"] == counts.lower_bound(700)[i] < found["precision"]
    right = found["results_per_query"] - found["wrong_per_query"]
    assert right / found["results_per_query"] == pytest.approx(found["precision"])
    # Between two levels, nothing is promised that the lower one does not keep.
    assert counts.expect(LEVELS[i] - 0.01, 700) == found
  nothing = counts.expect(LEVELS[-1] + 1, 700)
  assert nothing["precision"] is None and nothing["precision_at_least"] is None


def test_without_pairs_no_precision_is_reached():
  z, right = np.full(29, 5.0), np.ones(29, bool)
  about = dict(images=100, positives=29)
  counts = counted(z, right, np.arange(29), np.arange(29), **about)
  assert counts.at_precision(0.1, 100) is None  # all are right, but too few
  counts = counted(np.full(60, 5.0), np.arange(60) < 20, np.arange(60), np.arange(60), **about)
  assert counts.at_precision(0.3, 100) == LEVELS[0]
  assert counts.at_precision(0.4, 100) is None
  assert counts.at_precision(0.3, 100, guarantee=True) is None


def test_precision_is_kept_down_to_the_threshold():
  """A dip at high scores is not jumped over: what passes there would be promised too much."""
  z = np.repeat([3.0, 2.0, 1.0], 40)
  right = np.concatenate([np.arange(40) < n for n in (30, 10, 40)])
  query = np.arange(120)
  counts = counted(z, right, query, query, images=500, positives=120)
  assert counts.at_precision(0.7, 500) == 2.05  # 30/40; 40/80 from 2 on; 80/120 from 1 on
  assert counts.at_precision(0.45, 500) == LEVELS[0]


def test_round_trip(sizes):
  counts = sizes[0].counts
  again = Counts.from_dict(json.loads(json.dumps(counts.to_dict())))
  for field in dataclasses.fields(counts):
    np.testing.assert_array_equal(getattr(again, field.name), getattr(counts, field.name))
  np.testing.assert_array_equal(again.lower_bound(700), counts.lower_bound(700))


@pytest.mark.parametrize(
  "damage",
  [
    lambda f: f["relevant"].pop(),
    lambda f: f.update(irrelevant=None),
    lambda f: f["levels"].pop(),
    lambda f: f.pop("levels"),
    lambda f: f.pop("queries"),
    lambda f: f.update(extra=1),
  ],
)
def test_damaged_counts_are_refused(sizes, damage):
  fields = json.loads(json.dumps(sizes[0].counts.to_dict()))
  damage(fields)
  with pytest.raises((KeyError, TypeError, ValueError)):
    Counts.from_dict(fields)
