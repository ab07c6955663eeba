"""The exact nearest rows of memory-mapped vectors, for few queries at a time and without delay."""

import numpy as np

_ROWS = 1 << 16  # of a tile: its scores stay in the cache
_BLOCK = 64
_QUERIES = 64  # at once


def nearest(vectors, queries, k):
  """[N, D], [Q, D], k ≤ N -> int64 [Q, k] rows, float32 [Q, k] dot products, best first."""
  return scan(vectors, queries, k)[:2]


def scan(vectors, queries, k, least=None, mask=None):
  """`nearest` among the rows of `mask`, bool [N], and the scores of all rows from `least`, [Q], on.

  k is at most the number of these rows. Third, a list of float32 arrays in no order, one for each
  query; None without `least`.
  """
  rows, scores = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
  passing = None if least is None else []
  for i in range(0, len(queries) if k else 0, _QUERIES):
    some = slice(i, i + _QUERIES)
    rows[some], scores[some], above = _scan(
      vectors, queries[some], k, None if least is None else least[some], mask
    )
    if above is not None:
      passing += above
  return rows, scores, passing if k or passing is None else [scores[0, :0]] * len(queries)


def _scan(vectors, queries, k, least, mask):
  rows, scores, passing = [], [], [[] for _ in queries]
  for numbers, found in tiles(vectors, queries, mask):
    if least is not None:
      for one, of, low in zip(passing, found, least, strict=True):
        one.append(of[of >= low])
    at = _top(found, min(k, found.shape[1]))
    rows.append(numbers[at])
    scores.append(np.take_along_axis(found, at, axis=1))
  rows, scores = np.hstack(rows), np.hstack(scores)
  order = np.lexsort((rows, -scores), axis=1)[:, :k]
  rows, scores = (np.take_along_axis(x, order, axis=1) for x in (rows, scores))
  return rows, scores, None if least is None else [np.concatenate(one) for one in passing]


def tiles(vectors, queries, mask=None):
  """Yields row numbers int64 [n] and scores float32 [Q, n], of the rows of `mask`, in order."""
  for start in range(0, len(vectors), _ROWS):
    tile, numbers = (
      vectors[start : start + _ROWS],
      np.arange(start, min(start + _ROWS, len(vectors))),
    )
    if mask is not None and not (inside := mask[start : start + _ROWS]).all():
      tile, numbers = tile[inside], numbers[inside]
    if len(numbers):
      # BLAS has no float16: NumPy would multiply without it, a hundred times slower.
      yield numbers, queries @ np.asarray(tile, np.float32).T


def _top(scores, k):
  """[q, n] -> int64 [q, k]: where the k highest are, in any order.

  They lie in the k blocks with the highest maxima: only these are looked through.
  """
  q, n = scores.shape
  blocks = n // _BLOCK
  if k == n:
    return np.broadcast_to(np.arange(n), (q, n))
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
