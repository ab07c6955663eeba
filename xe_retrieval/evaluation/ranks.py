"""Exact ranks of the right answer among any number of documents, without any top-k.

The rank is the number of documents that outscore the right one: 0 is first. Scores are float32
dot products; those that are too close to the right one's to be told apart in float32 are compared
in float64. Ties: documents with equal scores keep their order, images before distractors, as in a
stable sort; so a model that gives every pair the same score is right once in M, not always.
"""

import numpy as np

from xe_retrieval.evaluation import bootstrap, score_tiles

AT = (1, 5, 10, 100)  # the k of Recall@k


def text_to_image(text, image, image_of_text, distractors=None, devices=None):
  """[Q, D], [M, D], int [Q], [N, D] or a list of such -> int64 [Q]: rank of each caption's image.

  Streams the images past the captions: on the CPU in NumPy, on accelerators (or the `devices`
  given) in JAX, images sharded over them.
  """
  text, image, image_of_text = score_tiles.pairing(text, image, image_of_text)
  return _ranks(text, score_tiles.parts(image, distractors), image_of_text, devices)


def image_to_text(text, image, image_of_text, devices=None):
  """[Q, D], [M, D], int [Q] -> int64 [images with captions]: rank of the first right caption.

  Any caption of the image is right. Images without captions ask no question and are left out.
  """
  text, image, image_of_text = score_tiles.pairing(text, image, image_of_text)
  scores = _own_scores(text, image, image_of_text)
  order = np.lexsort((-scores, image_of_text))  # by image, its best caption first; stable
  asked, first = np.unique(image_of_text[order], return_index=True)
  return _ranks(image[asked], [text], order[first], devices)


def recall_at(ranks, k):
  """int [Q] -> share of queries, in percent, whose right answer is among the first k."""
  return 100.0 * float(np.mean(ranks < k))


def median(ranks):
  """int [Q] -> median rank, counted from 1 as the field does."""
  return float(np.median(ranks)) + 1


def summary(ranks):
  """int [Q] -> Recall@1/5/10/100 in percent and the median rank (1 = first)."""
  return {f"recall@{k}": recall_at(ranks, k) for k in AT} | {"median_rank": median(ranks)}


def intervals(draws, ranks):
  """float32 [S, Q], int [Q] -> [low, high] for each entry of `summary`."""
  recall = {f"recall@{k}": bootstrap.mean(draws, 100.0 * (ranks < k)) for k in AT}
  return recall | {"median_rank": bootstrap.median(draws, ranks + 1)}


def _ranks(queries, parts, own, devices):
  """[Q, D], documents in parts, int [Q] row of the right document in parts[0] -> int64 [Q]."""
  if devices is None:
    import jax  # only here: reading ranks on a laptop should not wait for it

    devices = [] if jax.default_backend() == "cpu" else jax.local_devices()
  if devices:
    return _ranks_on(devices, queries, parts, own)
  right = _Right(queries, parts, own)
  rank = np.zeros(len(queries), np.int64)
  scratch = np.empty(score_tiles.QUERIES * score_tiles.DOCUMENTS, np.float32)
  for start, documents in score_tiles.progress(
    list(score_tiles.stream(parts, score_tiles.DOCUMENTS)), "exact ranks"
  ):
    for rows in score_tiles.spans(len(queries), score_tiles.QUERIES):
      scores = score_tiles.product(queries[rows], documents, scratch)  # [q, n]
      rank[rows] += right.outscored(rows.start, scores, documents, start)
  return rank


class _Right:
  """The right documents of all queries, and what it takes to outscore them."""

  def __init__(self, queries, parts, own):
    self.queries, self.own = queries, own
    self.bar = _own_scores(queries, parts[0], own)
    longest = max(np.sqrt(np.einsum("nd,nd->n", part, part).max(initial=0)) for part in parts)
    unsure = _ROUNDING * np.linalg.norm(queries, axis=1) * longest + 1e-30
    self.low, self.high = (
      np.asarray(x, np.float32) for x in (self.bar - unsure, self.bar + unsure)
    )

  def outscored(self, first, scores, documents, start):
    """float32 [q, n] of queries number `first`, … and documents `start`, … -> int64 [q]."""
    counts, above = np.zeros(len(scores), np.int64), np.empty(scores.shape[1], bool)
    for i, row in enumerate(scores):  # row by row: in the cache, and with one level for all of it
      q = first + i
      counts[i] = np.count_nonzero(np.greater(row, self.high[q], out=above))
      if np.count_nonzero(np.greater(row, self.low[q], out=above)) != counts[i]:
        counts[i] += self.settle(q, row, documents, start)
    return counts

  def settle(self, q, scores, documents, start):
    """How many of the documents whose score [n] is too close to tell outscore the right one."""
    close = np.flatnonzero((scores > self.low[q]) & (scores <= self.high[q]))
    before = close + start < self.own[q]
    if len(close) > _MANY:  # a model that has collapsed, not a rounding error
      return np.count_nonzero(before)
    exact = _exact(self.queries[q], documents[close])
    return np.count_nonzero((exact > self.bar[q]) | (exact == self.bar[q]) & before)


_ROUNDING = 2.0**-21  # of unit vectors' float32 dot products, with some reserve
_MANY = 1000


def _own_scores(queries, documents, own):  # [Q, D], [N, D], int [Q] -> float64 [Q]
  spans = score_tiles.spans(len(queries), 8192)
  return np.concatenate([_exact(queries[rows], documents[own[rows]]) for rows in spans])


def _exact(a, b):  # float32 [..., D] twice -> float64 [...], the same for the same rows anywhere
  return np.sum(a.astype(np.float64) * b, axis=-1)


def _ranks_on(devices, queries, parts, own):
  """The same count in JAX: queries on every device, documents sharded over them."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding, PartitionSpec

  mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
  everywhere = NamedSharding(mesh, PartitionSpec())
  sharded = NamedSharding(mesh, PartitionSpec("data"))

  def blocks(x):  # [Q, ...] -> [b, q, ...] on every device
    x = np.pad(x, [(0, -len(x) % score_tiles.QUERIES)] + [(0, 0)] * (x.ndim - 1))
    return jax.device_put(x.reshape(-1, score_tiles.QUERIES, *x.shape[1:]), everywhere)

  def dot(a, b):
    return jnp.matmul(a, b.T, precision="highest")  # float32 also where bfloat16 is the default

  @jax.jit
  def count(queries, low, high, documents, size):  # -> int32 [2, b, q]: surely, maybe
    real = jnp.arange(len(documents)) < size

    def block(queries_low_high):
      queries, *levels = queries_low_high
      scores = dot(queries, documents)
      above = [jnp.sum((scores > x[:, None]) & real, axis=1, dtype=jnp.int32) for x in levels]
      return jnp.stack(above[::-1])

    return jnp.swapaxes(jax.lax.map(block, (queries, low, high)), 0, 1)

  right = _Right(queries, parts, own)
  rank = np.zeros(len(queries), np.int64)
  q, low, high = blocks(queries), blocks(right.low), blocks(right.high)
  stream = list(score_tiles.stream(parts, score_tiles.DOCUMENTS * len(devices)))
  for start, documents in score_tiles.progress(stream, "exact ranks"):
    padding = -len(documents) % (128 * len(devices))  # few distinct shapes to compile
    full = jax.device_put(np.pad(documents, ((0, padding), (0, 0))), sharded)
    counts = np.asarray(count(q, low, high, full, len(documents))).reshape(2, -1)
    surely, maybe = counts[:, : len(queries)]
    rank += surely
    unsure = np.flatnonzero(surely != maybe)
    for rows in score_tiles.spans(len(unsure), score_tiles.QUERIES) if len(unsure) else ():
      scores = score_tiles.product(queries[unsure[rows]], documents)
      for row, i in zip(scores, unsure[rows], strict=True):
        rank[i] += right.settle(i, row, documents, start)
  return rank
