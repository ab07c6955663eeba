"""Retrieval figures against any relevance: by hand and against scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from xe_retrieval.evaluation import relevance_metrics
from xe_retrieval.evaluation.embedded import Images, Pairs
from xe_retrieval.evaluation.relevance import Relevance


def data(scores, right, known=None):
  """Vectors with exactly these scores [Q, N]."""
  queries, images = scores.shape
  gallery = Images(np.eye(images, dtype=np.float32))
  pairs = Pairs(scores.astype(np.float32), gallery, np.zeros(queries, int), [], lambda m: b"")
  known = np.arange(queries) if known is None else known
  return pairs, [gallery], Relevance("truth", lambda rows, part: right[rows], known, 1)


def test_by_hand():
  scores = np.array([[0.9, 0.8, 0.3, 0.2], [0.1, 0.5, 0.7, 0.4], [0.6, 0.65, 0, -1]])
  right = np.array([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 0]], bool)
  found, curve = relevance_metrics.measure(*data(scores, right))
  # R = 2: hits 1 0; R = 1: 0; R = 3: 1 1 1.
  assert found["r_precision"] == pytest.approx(100 * (1 / 2 + 0 + 1) / 3)
  assert found["map_at_r"] == pytest.approx(100 * (1 / 2 + 0 + 1) / 3)
  assert (found["queries"], found["relevant_per_query"]) == (3, 2)
  # Falling: 0.9+ 0.8 0.7 0.65+ 0.6+ 0.5 0.4+ 0.3+ 0.2 0.1 0+ -1
  assert curve.true.tolist() == [1, 2, 3, 4, 5, 6]
  assert curve.returned.tolist() == [1, 4, 5, 7, 8, 11]
  np.testing.assert_allclose(curve.thresholds, [0.9, 0.65, 0.6, 0.4, 0.3, 0], atol=1e-6)
  assert found["pr_auc"] == pytest.approx(100 * (1 + 2 / 4 + 3 / 5 + 4 / 7 + 5 / 8 + 6 / 11) / 6)


def test_map_at_r_weighs_the_order():
  # R = 3, hits at the second and third place: (1/2 + 2/3) / 3.
  scores, right = np.array([[0.9, 0.8, 0.7, 0.6]]), np.array([[0, 1, 1, 1]], bool)
  found, _ = relevance_metrics.measure(*data(scores, right))
  assert found["map_at_r"] == pytest.approx(100 * (1 / 2 + 2 / 3) / 3)
  assert found["r_precision"] == pytest.approx(100 * 2 / 3)


@pytest.mark.parametrize("known", [None, np.arange(3, 90, 2)])
def test_equal_to_scikit_learn(known):
  random = np.random.default_rng(0)
  scores = random.uniform(-1, 1, (100, 80))
  right = random.random(scores.shape) < 0.02 + 0.2 * (scores > 0.3)
  found, curve = relevance_metrics.measure(*data(scores, right, known))
  rows = np.arange(100) if known is None else known
  expected = metrics.average_precision_score(right[rows].ravel(), scores[rows].ravel())
  assert found["pr_auc"] == pytest.approx(100 * expected, abs=1e-3)
  assert (curve.positives, curve.pairs) == (right[rows].sum(), right[rows].size)
  precision = []
  for q in rows:
    if count := right[q].sum():
      precision.append(right[q][np.argsort(-scores[q])[:count]].mean())
  assert found["r_precision"] == pytest.approx(100 * np.mean(precision))


def test_distractors_that_the_source_does_not_know_are_left_out():
  scores, right = np.array([[0.9, 0.8]]), np.array([[True, False]])
  pairs, gallery, source = data(scores, right)
  found, _ = relevance_metrics.measure(pairs, [*gallery, Images(np.ones((5, 2)))], source)
  assert found["pr_auc"] == 100
