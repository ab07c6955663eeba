"""All that is counted of scores, in one pass over the documents: tile by tile, merged by sums.

For each query: how many documents outscore the right one, how many score at least each of some
levels (the lines of the paper's score plot), and the highest scores. Over all queries: how many
pairs score at least as much as each positive pair, from which precision and recall follow.

Each process counts its share of the tiles. The tiles are the same for any number of processes, so
the scores in them are, to the last bit. On the CPU, NumPy multiplies and counts; on accelerators
(or the `devices` given) JAX does, each tile on one of them.
"""

import collections
import concurrent.futures
import dataclasses
import functools

import numpy as np

from xe_retrieval.evaluation import score_tiles
from xe_retrieval.preparation import cores
from xe_retrieval.training import processes

TOP = 100
_ROUNDING = 2.0**-21  # of unit vectors' float32 dot products, with some reserve
_MANY = 1000


@dataclasses.dataclass(frozen=True)
class PairCounts:
  """Counts over some documents; those over others are added by `+`."""

  outscored: np.ndarray  # int64 [Q]: documents that outscore the right one; 0: it is first
  returned: np.ndarray  # int64 [T]: pairs that score at least each of Matches.thresholds
  levels: np.ndarray  # float32 [L], rising
  counts: np.ndarray  # int32 [Q, L]: documents that score at least the level
  top: np.ndarray  # float32 [Q, ≤ TOP]: the highest scores, falling
  documents: int

  def at(self, levels):
    """At some of the levels only."""
    column = np.searchsorted(self.levels, levels)
    return dataclasses.replace(self, levels=self.levels[column], counts=self.counts[:, column])

  def __add__(self, other):
    documents = self.documents + other.documents
    return PairCounts(
      self.outscored + other.outscored,
      self.returned + other.returned,
      self.levels,
      self.counts + other.counts,
      _highest(np.concatenate([self.top, other.top], axis=1), min(TOP, documents)),
      documents,
    )


class Matches:
  """Queries [Q, D] and for each the row of its right one among documents [M, D]."""

  def __init__(self, queries, documents, right, devices=None):
    if devices is None:
      import jax  # only here: reading ranks on a laptop should not wait for it

      devices = [] if jax.default_backend() == "cpu" else jax.local_devices()
    self._backend = _Jax(devices) if devices else _NumPy()
    self.order = np.argsort(right, kind="stable")  # right ones are then in few tiles
    self.queries, self.right, self.documents = queries[self.order], right[self.order], documents

  @functools.cached_property
  def own(self):
    """float32 [Q]: scores of the right documents, from the products in which they are counted."""
    own = np.zeros(len(self.queries), np.float32)
    for start, documents, rows in processes.share(self._tiles([self.documents])):
      column = self.right[rows] - start
      here = np.flatnonzero((column >= 0) & (column < len(documents)))
      if here.size:
        scores = self._backend.product(self.queries[rows], documents)
        own[rows][here] = self._backend.pick(scores, here, column[here])
    return self._unsorted(processes.total(own))

  @functools.cached_property
  def thresholds(self):
    """float32 [T], rising: every score of a right document, once."""
    return np.unique(self.own)

  def count(self, parts=None, ranks=True, returned=True, levels=()) -> PairCounts:
    """Of the documents themselves, or of `parts` [N, D] that are searched besides."""
    after = 0 if parts is None else len(self.documents)
    parts = [self.documents] if parts is None else parts
    documents, q = sum(map(len, parts)), len(self.queries)
    levels = np.asarray(levels, np.float32)
    # Tolerance for float32 rounding, so that a score counts as ≥ itself.
    barely = levels - np.float32(_ROUNDING)
    thresholds = self.thresholds if returned else np.zeros(0, np.float32)
    bars = _Bars(self.queries, self.documents, self.right, parts) if ranks else None
    outscored, sums = np.zeros(q, np.int64), np.zeros(len(thresholds), np.int64)
    counts = np.zeros((q, len(levels)), np.int32)
    top = np.full((q, min(TOP, documents) if len(levels) else 0), -np.inf, np.float32)

    def collect(tile, found):
      start, part, rows = tile
      above, returned, at, best = found()
      if bars:
        outscored[rows] += bars.outscored(rows, part, start + after, *above)
      np.add(sums, returned, out=sums)
      if len(levels):
        counts[rows] += at
        top[rows] = _highest(np.concatenate([top[rows], best], axis=1), top.shape[1])

    tiles = processes.share(self._tiles(parts))
    with self._backend as backend:
      waiting = collections.deque()
      for tile in score_tiles.progress(tiles, "counting scores"):
        _, part, rows = tile
        limits = (bars.low[rows], bars.high[rows]) if bars else None
        scores = backend.product(self.queries[rows], part)
        asked = (limits, thresholds, barely, top.shape[1])
        waiting.append((tile, backend.count(scores, *asked)))
        if len(waiting) > backend.ahead:
          collect(*waiting.popleft())
      while waiting:
        collect(*waiting.popleft())
    whole = [self._unsorted(processes.total(x)) for x in (outscored, counts)]
    best = processes.gather(top) if top.size else [top]
    top = self._unsorted(_highest(np.concatenate(list(best), axis=1), top.shape[1]))
    return PairCounts(whole[0], processes.total(sums), levels, whole[1], top, documents)

  def _tiles(self, parts):
    """(number of the first document, documents [n, D], which queries) of every tile."""
    return [
      (start, documents, rows)
      for start, documents in score_tiles.stream(parts, score_tiles.DOCUMENTS)
      for rows in score_tiles.spans(len(self.queries), score_tiles.QUERIES)
    ]

  def _unsorted(self, values):
    out = np.empty_like(values)
    out[self.order] = values
    return out


class _Bars:
  """What it takes to outscore the right documents.

  Scores too close to the right one's to be told apart in float32 are compared in float64. Documents
  with equal scores keep their order.
  """

  def __init__(self, queries, documents, right, parts):
    self.queries, self.right = queries, right
    self.bar = own_scores(queries, documents, right)
    longest = max(
      np.sqrt(np.einsum("nd,nd->n", part, part).max(initial=0)) for part in (documents, *parts)
    )
    unsure = _ROUNDING * np.linalg.norm(queries, axis=1) * longest + 1e-30
    self.low, self.high = (
      np.asarray(x, np.float32) for x in (self.bar - unsure, self.bar + unsure)
    )

  def outscored(self, rows, documents, start, surely, maybe):
    """Counts [q] above the high and the low bars, of documents `start`, … -> int64 [q]."""
    counts, unsure = surely.astype(np.int64), np.flatnonzero(surely != maybe)
    if unsure.size:
      scores = score_tiles.product(self.queries[rows][unsure], documents)
      for i, row in zip(unsure, scores, strict=True):
        counts[i] += self._settle(rows.start + i, row, documents, start)
    return counts

  def _settle(self, q, scores, documents, start):
    """How many of the documents whose score [n] is too close to tell outscore the right one."""
    close = np.flatnonzero((scores > self.low[q]) & (scores <= self.high[q]))
    before = close + start < self.right[q]
    if len(close) > _MANY:  # a model that has collapsed, not a rounding error
      return np.count_nonzero(before)
    exact = _exact(self.queries[q], documents[close])
    return np.count_nonzero((exact > self.bar[q]) | (exact == self.bar[q]) & before)


def own_scores(queries, documents, right):  # [Q, D], [N, D], int [Q] -> float64 [Q]
  spans = score_tiles.spans(len(queries), 8192)
  return np.concatenate([_exact(queries[rows], documents[right[rows]]) for rows in spans])


def _exact(a, b):  # float32 [..., D] twice -> float64 [...], the same for the same rows anywhere
  return np.sum(a.astype(np.float64) * b, axis=-1)


def _highest(scores, count):
  """[q, n] -> [q, count], falling."""
  return -np.sort(-scores, axis=1)[:, :count]


class _NumPy:
  """While one tile is multiplied, which takes every core, threads count those before it."""

  ahead = min(8, cores.available())

  def __enter__(self):
    self._pool = concurrent.futures.ThreadPoolExecutor(self.ahead)
    return self

  def __exit__(self, *_):
    self._pool.shutdown()

  def product(self, queries, documents):
    return score_tiles.product(queries, documents)

  def pick(self, scores, rows, columns):
    return scores[rows, columns]

  def count(self, scores, limits, thresholds, barely, top):
    """A function that waits for the two counts [q], [T], [q, L] and [q, ≤ top]."""
    return self._pool.submit(self._count, scores, limits, thresholds, barely, top).result

  @staticmethod
  def _count(scores, limits, thresholds, barely, top):
    above = returned = at = best = None
    if limits:  # row by row: in the cache, and with one level for all of it
      above = np.array(
        [
          [np.count_nonzero(row > high), np.count_nonzero(row > low)]
          for row, low, high in zip(scores, *limits, strict=True)
        ]
      ).T
    if top:
      rows = np.sort(scores, axis=1)
      below = [np.searchsorted(row, barely) for row in rows]
      at, best = scores.shape[1] - np.array(below, np.int32), rows[:, -top:]
    flat = scores.reshape(-1)
    if len(thresholds):
      flat.sort()
    returned = flat.size - np.searchsorted(flat, thresholds) if len(thresholds) else 0
    return above, returned, at, best


class _Jax:
  """The same counts in JAX: the devices take turns, and scores stay there."""

  def __init__(self, devices):
    self._devices, self._next, self.ahead = devices, 0, 2 * len(devices)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def product(self, queries, documents):
    import jax

    device = self._devices[self._next]
    self._next = (self._next + 1) % len(self._devices)
    return _jitted()[0](*jax.device_put((queries, documents), device))

  def pick(self, scores, rows, columns):
    return np.asarray(scores)[rows, columns]

  def count(self, scores, limits, thresholds, barely, top):
    found = _jitted()[1](scores, limits, thresholds, barely, top)

    def wait():
      above, returned, at, best = (x if x is None else np.asarray(x) for x in found)
      return above, 0 if returned is None else returned, at, best

    return wait


@functools.cache
def _jitted():
  """The product, and the counts of its scores. Two programs, for all tiles the same product."""
  import jax
  import jax.numpy as jnp

  @jax.jit
  def product(queries, documents):
    # float32 also where bfloat16 is the default
    return jnp.matmul(queries, documents.T, precision="highest")

  @functools.partial(jax.jit, static_argnums=4)
  def count(scores, limits, thresholds, barely, top):
    above = returned = at = best = None
    if limits is not None:
      low, high = limits
      above = [jnp.sum(scores > x[:, None], axis=1, dtype=jnp.int32) for x in (high, low)]
      above = jnp.stack(above)
    if top:
      rows = jnp.sort(scores, axis=1)
      at = scores.shape[1] - jax.vmap(lambda row: jnp.searchsorted(row, barely))(rows)
      best = rows[:, -top:]
    if len(thresholds):
      flat = jnp.sort(scores.reshape(-1))
      returned = flat.size - jnp.searchsorted(flat, thresholds)
    return above, returned, at, best

  return product, count
