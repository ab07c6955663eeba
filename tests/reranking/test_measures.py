"""Figures of re-ranked lists, by hand and against the plain computation over all pairs."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from xe_retrieval.reranking import first_stage, measures
from xe_retrieval.reranking.measures import Lists


def lists(count=4, queries=40, gallery=25, seed=0):
  """Random vectors; logits that know a little of the truth."""
  random = np.random.default_rng(seed)
  text, image = random.normal(size=(queries, 6)), random.normal(size=(gallery, 6))
  right = random.integers(0, gallery, queries)
  text = np.float32(text + image[right])
  image = np.float32(image)
  scores = text @ image.T
  images = first_stage.candidates(text, image, count)
  own = images == right[:, None]
  logits = random.normal(size=images.shape).astype(np.float32) + own
  first = np.take_along_axis(scores, images, axis=1)
  before = (scores > scores[np.arange(queries), right][:, None]).sum(axis=1)
  return Lists(images, first, logits, own, before, gallery), scores, right


def whole(found, weight, scores):
  """The score of every pair [Q, M]: unread ones at the bottom."""
  out = np.full(scores.shape, -1e6)
  np.put_along_axis(out, found.images, found.final(weight), axis=1)
  return out


@pytest.mark.parametrize("count", [4, 25])
def test_ranks_and_pr_auc_are_those_of_all_pairs(count):
  found, scores, right = lists(count)
  assert (count == 4) == (not found.own.any(axis=1).all())  # some are outside
  for weight in (0.0, 1.0):
    every = whole(found, weight, scores)
    positive = np.arange(scores.shape[1]) == right[:, None]
    expected = 100 * average_precision_score(positive.ravel(), every.ravel())
    assert measures.pr_auc(found, found.final(weight)) == pytest.approx(expected)
    inside = found.own.any(axis=1)
    rank = measures.rank(found, found.final(weight))
    bar = every[np.arange(len(right)), right][:, None]
    np.testing.assert_array_equal(rank[inside], (every > bar).sum(axis=1)[inside])
    np.testing.assert_array_equal(rank[~inside], found.before[~inside])
  np.testing.assert_array_equal(measures.rank(found, found.final(0.0)), found.before)


def test_by_hand():
  images = np.array([[0, 1], [1, 0], [0, 1]])
  own = np.array([[False, True], [True, False], [False, False]])
  first = np.float32([[3, 2], [2, 1], [5, 4]])
  logits = np.float32([[0, 2], [0, 1], [0, 0]])
  found = Lists(images, first, logits, own, np.array([1, 0, 2]), 3)
  np.testing.assert_array_equal(measures.rank(found, found.final(1.0)), [0, 0, 2])
  # At a tie, the first stage's order stays.
  np.testing.assert_array_equal(measures.rank(found, found.final(0.5)), [1, 0, 2])
  # Highest first: 5, 4 (wrong), 4 (right), 3, 2, 2 (right) and the third of nine pairs unread.
  expected = 100 * (1 / 3 * 1 / 3 + 1 / 3 * 2 / 6 + 1 / 3 * 3 / 9)
  assert measures.pr_auc(found, found.final(1.0)) == pytest.approx(expected)


def test_the_weight_is_the_best_one():
  found, *_ = lists(8, 300)
  chosen = measures.choose_weight(found)
  assert 0 < chosen < 64
  quality = {w: measures.figures(found, w) for w in measures.WEIGHTS}
  mean = {
    w: np.mean([f["pr_auc"], *(f["text_to_image"][f"recall@{k}"] for k in (1, 5, 10))])
    for w, f in quality.items()
  }
  assert mean[chosen] == max(mean.values())
  useless = Lists(found.images, found.first, -100 * found.own.astype(np.float32), found.own,
    found.before, found.gallery)  # fmt: skip
  assert measures.choose_weight(useless) == 0


def test_probabilities_rise_with_the_score_and_hold():
  found, *_ = lists(8, 4_000)
  other, *_ = lists(8, 4_000, seed=1)
  meaning = measures.calibrate(found, 1.0)
  shown = measures.calibration(other, 1.0, meaning)
  assert shown["ece"] < 0.03 and sum(n for *_, n in shown["reliability"]) == 4_000 * 8
  scores = np.linspace(-5, 25, 50)[None]
  probability = meaning.probability(scores)[0]
  assert (np.diff(probability) >= 0).all() and 0 <= probability[0] < probability[-1] <= 1
  again = measures.Meaning.from_dict(meaning.to_dict())
  np.testing.assert_allclose(again.probability(scores)[0], probability)
