"""The streaming curve against scikit-learn on the whole score matrix."""

import numpy as np
import pytest
from sklearn import metrics

from xe_retrieval.evaluation import precision_recall


def test_by_hand():
  # Sorted: 0.9+ 0.8- 0.7+ 0.6- -> (1/1 + 2/3) / 2.
  text = np.array([[0.9, 0.8], [0.6, 0.7]], np.float32)
  found = precision_recall.curve(text, np.eye(2, dtype=np.float32), np.arange(2))
  assert found.average_precision == pytest.approx(5 / 6, abs=1e-15)
  np.testing.assert_array_equal(found.thresholds, np.float32([0.9, 0.7]))
  np.testing.assert_array_equal(found.recall, [0.5, 1.0])
  np.testing.assert_array_equal(found.precision, [1, 2 / 3])
  assert (found.positives, found.pairs) == (2, 4)


@pytest.mark.parametrize("levels", [None, 64, 3, 1])
@pytest.mark.parametrize("extra", [0, 500])
def test_equal_to_scikit_learn(levels, extra):
  text, image, own, distractors = _data(900, 400, extra, levels)
  scores = text @ np.concatenate([image, distractors]).T
  truth = np.zeros(scores.shape, bool)
  truth[np.arange(len(text)), own] = True
  found = precision_recall.curve(text, image, own, distractors if extra else None)
  expected = metrics.average_precision_score(truth.ravel(), scores.ravel())
  assert found.average_precision == pytest.approx(expected, abs=1e-12)
  precision, recall, thresholds = metrics.precision_recall_curve(truth.ravel(), scores.ravel())
  at = np.searchsorted(thresholds, found.thresholds)
  np.testing.assert_array_equal(thresholds[at], found.thresholds)
  np.testing.assert_allclose(precision[at], found.precision, rtol=0, atol=1e-15)
  np.testing.assert_allclose(recall[at], found.recall, rtol=0, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [None, 200, 1])
def test_equal_to_scikit_learn_at_16m_pairs(levels):
  text, image, own, _ = _data(4096, 4096, 0, levels)
  truth = np.zeros((4096, 4096), bool)
  truth[np.arange(4096), own] = True
  expected = metrics.average_precision_score(truth.ravel(), (text @ image.T).ravel())
  found = precision_recall.curve(text, image, own)
  assert found.average_precision == pytest.approx(expected, abs=1e-9)


def _data(queries, images, distractors, levels):
  """Vectors of integers, or with `levels` single numbers, whose products take few values.

  Their products are exact in float32: BLAS rounds differently in tiles of another size.
  """
  rng = np.random.default_rng(queries)
  own = rng.integers(0, images, queries)
  sizes = (queries, images, distractors)
  if levels:
    text, image, extra = (rng.integers(1, levels + 1, (n, 1)).astype(np.float32) for n in sizes)
    return text, image, own, extra
  text, image, extra = (rng.integers(-99, 100, (n, 32)).astype(np.float32) for n in sizes)
  return image[own] + 2 * text, image, own, extra
