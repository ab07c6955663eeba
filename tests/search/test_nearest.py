"""The fast exact search against sorting everything."""

import numpy as np
import pytest

from xe_retrieval.search.stores import nearest


@pytest.mark.parametrize("count, k", [(5, 5), (1000, 3), (4133, 7), (4133, 4133), (70_001, 20)])
def test_equal_to_sorting(count, k):
  random = np.random.default_rng(0)
  vectors = random.standard_normal((count, 8), np.float32)
  queries = random.standard_normal((67, 8), np.float32)
  rows, scores = nearest.nearest(vectors, queries, k)
  expected = -np.sort(-(queries @ vectors.T), axis=1)[:, :k]
  np.testing.assert_allclose(scores, expected, atol=1e-5)
  found = np.einsum("qd,qkd->qk", queries[:9], vectors[rows[:9]])
  np.testing.assert_allclose(found, scores[:9], atol=1e-5)
  assert all(len(set(row)) == k for row in rows[:9].tolist())


def test_equal_scores_come_in_order():
  vectors = np.zeros((500, 4), np.float32)
  rows, scores = nearest.nearest(vectors, np.ones((2, 4), np.float32), 500)
  assert (rows == np.arange(500)).all() and not scores.any()


def test_nothing_asked():
  rows, scores = nearest.nearest(np.ones((3, 2), np.float32), np.ones((0, 2), np.float32), 2)
  assert rows.shape == scores.shape == (0, 2)


def test_nothing_there():
  rows, scores = nearest.nearest(np.ones((0, 2), np.float32), np.ones((3, 2), np.float32), 0)
  assert rows.shape == scores.shape == (3, 0)
