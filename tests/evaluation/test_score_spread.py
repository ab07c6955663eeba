"""How far queries agree on one threshold, by hand and against scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from xe_retrieval.evaluation import pair_counts, precision_recall, score_spread
from xe_retrieval.evaluation.embedded import Images, Pairs
from xe_retrieval.evaluation.relevance import Relevance


def between_queries(scores, right):
  """Of vectors with exactly these scores [Q, N]."""
  queries, images = scores.shape
  gallery = Images(np.eye(images, dtype=np.float32))
  pairs = Pairs(scores.astype(np.float32), gallery, np.zeros(queries, int), [], lambda m: b"")
  source = Relevance("truth", lambda rows, part: right[rows], np.arange(queries), 1)
  return score_spread.between_queries(pairs, source)


def test_average_precision_of_each_query():
  random = np.random.default_rng(0)
  scores = random.uniform(-1, 1, (50, 40))
  right = random.random(scores.shape) < 0.1
  right[0] = False  # counts for nothing
  found = between_queries(scores, right)["ap_per_query"]
  expected = [
    metrics.average_precision_score(r, s) for r, s in zip(right, scores, strict=True) if r.any()
  ]
  assert found == pytest.approx(np.mean(expected))


def test_queries_with_the_same_scores_do_not_differ():
  random = np.random.default_rng(1)
  row, right = random.uniform(-1, 1, 200), np.arange(200) < 20
  scores, truth = np.tile(row, (30, 1)), np.tile(right, (30, 1))
  order = np.stack([random.permutation(200) for _ in range(30)])
  found = between_queries(*(np.take_along_axis(x, order, axis=1) for x in (scores, truth)))
  assert found["opis"] == pytest.approx(0, abs=1e-15)
  assert found["opis_strict"] == pytest.approx(0, abs=1e-15)


def test_utility_by_hand():
  score, yes = np.array([0.9, 0.4, 0.8, 0.3, 0.2, 0.1]), np.array([1, 1, 0, 0, 0, 0], bool)
  # From 0.5 on: 1 of 2 relevant, 3 of 4 irrelevant stay out. From 0.3 on: 2 of 2, 2 of 4.
  expected = [2 * 0.5 * 0.75 / 1.25, 2 * 1 * 0.5 / 1.5, 0]
  found = score_spread._utility(score, yes, np.array([0.5, 0.3, 0.95]))
  np.testing.assert_allclose(found, expected)


def test_opis_by_brute_force():
  random = np.random.default_rng(2)
  right = np.arange(300) < np.array([[30]] * 20)
  scores = random.normal(0.1 + 0.4 * right, 0.1) + random.normal(0, 0.1, (20, 1))
  found = between_queries(scores, right)["opis"]
  cuts = np.quantile(scores[~right].astype(np.float32), 1 - np.linspace(0.01, 0.1, 10))
  utility = np.empty((20, 10))
  for q in range(20):
    for t, cut in enumerate(cuts):
      sensitivity = np.mean(scores[q, right[q]] >= cut)
      specificity = np.mean(scores[q, ~right[q]] < cut)
      utility[q, t] = 2 * sensitivity * specificity / (sensitivity + specificity)
  expected = np.mean((utility - utility.mean(axis=0)) ** 2)
  assert found == pytest.approx(expected, rel=1e-3) and found > 0.01


def test_shifted_queries_differ_and_their_order_does_not():
  random = np.random.default_rng(3)
  right = np.arange(300) < np.array([[30]] * 40)
  same = random.normal(0.1 + 0.3 * right, 0.05)
  shifted = same + random.normal(0, 0.15, (40, 1))
  a, b = between_queries(same, right), between_queries(shifted, right)
  assert a["ap_per_query"] == pytest.approx(b["ap_per_query"])
  assert b["opis"] > 10 * a["opis"]


def test_bands():
  top = np.linspace(0, 1, 101, dtype=np.float32)[:, None] - np.float32([[0.0] * 9 + [0.5]])
  counts = pair_counts.PairCounts(None, None, np.float32([0]), np.zeros((101, 1)), top, 10)
  first, tenth = score_spread.bands(counts)
  assert (first["neighbours"], tenth["neighbours"]) == (1, 10)
  assert [first[k] for k in ("p5", "median", "p95", "width")] == pytest.approx(
    [0.05, 0.5, 0.95, 0.9]
  )
  assert tenth["median"] == pytest.approx(0)


def test_best_f1():
  # Sorted pairs: 0.9+ 0.8+ 0.7- 0.6+ 0.5- 0.4- 0.3+; F1 = 2·true/(returned + 4).
  levels = np.float32([0.9, 0.8, 0.6, 0.3])
  curve = precision_recall.Curve(levels, np.arange(1, 5), np.array([1, 2, 4, 7]), 4, 16)
  top = np.float32([[0.9], [0.8], [0.6], [0.3]])
  counts = pair_counts.PairCounts(None, None, levels, np.zeros((4, 4)), top, 4)
  found = score_spread.best_f1(curve, counts)
  assert found["threshold"] == pytest.approx(0.6)
  assert [found[k] for k in ("f1", "precision", "recall")] == pytest.approx([75, 75, 75])
  assert found["queries_without_result"] == 25
