"""Precision against true relevance, against scikit-learn and by hand."""

import numpy as np
import pytest
from sklearn import metrics

from xe_retrieval.evaluation import true_relevance


def test_equal_to_scikit_learn():
  random = np.random.default_rng(0)
  text, image = (random.standard_normal((n, 8)).astype(np.float32) for n in (300, 400))
  text, image = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
  relevant = random.random((300, 400)) < 0.2 + 0.3 * (text @ image.T > 0.3)
  found = true_relevance.measure(text, image, lambda rows: relevant[rows])
  scores = text @ image.T
  expected = metrics.average_precision_score(relevant.ravel(), scores.ravel())
  assert found.curve().average_precision == pytest.approx(expected, abs=1e-4)
  assert found.curve().positives == relevant.sum()
  kept = scores >= 0.25
  assert found.precision_at(0.25) == pytest.approx(relevant[kept].mean(), abs=1e-4)
  assert found.precision_at(0.9999) is None


def test_score_that_each_query_needs():
  text = np.float32([[1, 0], [0, 1]])
  image = np.float32([[0.9, 0.1], [0.8, 0.5], [0.3, 0.7], [0.2, 0.4]])
  relevant = np.array([[1, 0, 1, 0], [0, 0, 0, 1]], bool)
  found = true_relevance.measure(text, image, lambda rows: relevant[rows], targets=(0.9, 0.6, 0.3))
  # First query, falling: 0.9 true, 0.8 false, 0.3 true, 0.2 false: precisions 1, 1/2, 2/3, 1/2.
  # Second, falling: 0.7 false, 0.5 false, 0.4 true, 0.1 false: precisions 0, 0, 1/3, 1/4.
  expected = np.float32([[0.9, np.nan], [0.3, np.nan], [0.2, 0.4]])
  np.testing.assert_array_equal(found.needed, expected)
