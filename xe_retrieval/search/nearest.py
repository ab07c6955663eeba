"""The exact nearest rows of memory-mapped vectors, for few queries at a time and without delay."""

import numpy as np

_ROWS = 1 << 16  # of a tile: its scores stay in the cache
_BLOCK = 64
_QUERIES = 64  # at once


def nearest(vectors, queries, k):
  """[N, D], [Q, D], k ≤ N -> int64 [Q, k] rows, float32 [Q, k] dot products, best first."""
  rows, scores = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
  for i in range(0, len(queries) if k else 0, _QUERIES):
    some = slice(i, i + _QUERIES)
    rows[some], scores[some] = _nearest(vectors, queries[some], k)
  return rows, scores


def _nearest(vectors, queries, k):
  rows, scores = [], []
  for start in range(0, len(vectors), _ROWS):
    found = queries @ vectors[start : start + _ROWS].T  # [q, n]
    at = _top(found, min(k, found.shape[1]))
    rows.append(at + start)
    scores.append(np.take_along_axis(found, at, axis=1))
  rows, scores = np.hstack(rows), np.hstack(scores)
  order = np.lexsort((rows, -scores), axis=1)[:, :k]
  return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)


def _top(scores, k):
  """[q, n] -> int64 [q, k]: where the k highest are, in any order.

  They lie in the k blocks with the highest maxima: only these are looked through.
  """
  q, n = scores.shape
  blocks = n // _BLOCK
  if blocks <= 2 * k:
    return np.argpartition(scores, n - k, axis=1)[:, n - k :]
  whole = scores[:, : blocks * _BLOCK].reshape(q, blocks, _BLOCK)
  best = np.argpartition(whole.max(axis=2), blocks - k, axis=1)[:, blocks - k :]  # [q, k]
  at = (best[:, :, None] * _BLOCK + np.arange(_BLOCK)).reshape(q, -1)
  rest = np.broadcast_to(np.arange(blocks * _BLOCK, n), (q, n - blocks * _BLOCK))
  at = np.hstack([at, rest])  # [q, k · _BLOCK + rest]
  values = np.take_along_axis(scores, at, axis=1)
  top = np.argpartition(values, values.shape[1] - k, axis=1)[:, values.shape[1] - k :]
  return np.take_along_axis(at, top, axis=1)
