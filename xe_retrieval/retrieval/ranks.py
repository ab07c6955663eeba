"""Exact ranks of the right answer among any number of documents, without any top-k.

The rank is the number of documents that outscore the right one: 0 is first. Scores are float32
dot products. Ties: documents with equal scores keep their order, images before distractors, as in
a stable sort; so a model that gives every pair the same score is right once in M, not always.
"""

import numpy as np

from xe_retrieval.retrieval import tiles


def text_to_image(text, image, image_of_text, distractors=None, devices=None):
  """[Q, D], [M, D], int [Q], [N, D] or a list of such -> int64 [Q]: rank of each caption's image.

  Streams the images past the captions: on the CPU in NumPy, on accelerators (or the `devices`
  given) in JAX, images sharded over them.
  """
  text, image, image_of_text = tiles.pairing(text, image, image_of_text)
  return _ranks(text, tiles.parts(image, distractors), image_of_text, devices)


def image_to_text(text, image, image_of_text, devices=None):
  """[Q, D], [M, D], int [Q] -> int64 [images with captions]: rank of the first right caption.

  Any caption of the image is right. Images without captions ask no question and are left out.
  """
  text, image, image_of_text = tiles.pairing(text, image, image_of_text)
  scores = tiles.own_scores(text, image, image_of_text)
  order = np.lexsort((-scores, image_of_text))  # by image, its best caption first; stable
  asked, first = np.unique(image_of_text[order], return_index=True)
  return _ranks(image[asked], [text], order[first], devices)


def recall_at(ranks, k):
  """int [Q] -> share of queries, in percent, whose right answer is among the first k."""
  return 100.0 * float(np.mean(ranks < k))


def median(ranks):
  """int [Q] -> median rank, counted from 1 as the field does."""
  return float(np.median(ranks)) + 1


def _ranks(queries, parts, own, devices):
  """[Q, D], documents in parts, int [Q] row of the right document in parts[0] -> int64 [Q]."""
  if devices is None:
    import jax  # only here: reading ranks on a laptop should not wait for it

    devices = [] if jax.default_backend() == "cpu" else jax.devices()
  if devices:
    return _ranks_on(devices, queries, parts, own)
  bar = tiles.own_scores(queries, parts[0], own)
  rank = np.zeros(len(queries), np.int64)
  scratch = np.empty(tiles.QUERIES * tiles.DOCUMENTS, np.float32)
  above = np.empty(tiles.QUERIES * tiles.DOCUMENTS, bool)
  below_bar = np.nextafter(bar, np.float32(-np.inf))
  for start, documents in tiles.progress(list(tiles.stream(parts, tiles.DOCUMENTS)), "exact ranks"):
    stop = start + len(documents)
    # s >= bar is s > below_bar: equal scores in front of the right document outrank it.
    level = np.where(own >= stop, below_bar, bar)
    for rows in tiles.spans(len(queries), tiles.QUERIES):
      scores = tiles.product(queries[rows], documents, scratch)  # [q, n]
      greater = above[: scores.size].reshape(scores.shape)
      np.greater(scores, level[rows, None], out=greater)
      rank[rows] += [np.count_nonzero(row) for row in greater]
      for q in np.flatnonzero((own[rows] >= start) & (own[rows] < stop)):
        c = own[rows][q] - start
        rank[rows][q] += np.count_nonzero(scores[q, :c] == bar[rows][q]) - greater[q, c]
  return rank


def _ranks_on(devices, queries, parts, own):
  """The same count in JAX: queries on every device, documents sharded over them."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding, PartitionSpec

  mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
  everywhere = NamedSharding(mesh, PartitionSpec())
  sharded = NamedSharding(mesh, PartitionSpec("data"))

  def blocks(x):  # [Q, ...] -> [b, q, ...] on every device
    x = np.pad(x, [(0, -len(x) % tiles.QUERIES)] + [(0, 0)] * (x.ndim - 1))
    return jax.device_put(x.reshape(-1, tiles.QUERIES, *x.shape[1:]), everywhere)

  def dot(a, b):
    return jnp.matmul(a, b.T, precision="highest")  # float32 also where bfloat16 is the default

  @jax.jit
  def own_scores(queries, documents):  # [b, q, D], [b, q, D] -> [b, q]
    return jax.lax.map(lambda both: jnp.diagonal(dot(*both)), (queries, documents))

  @jax.jit
  def add(rank, queries, bar, own, documents, start, size):
    row = jnp.arange(len(documents))

    def count(block):
      queries, bar, own = block
      scores, bar, own = dot(queries, documents), bar[:, None], own[:, None] - start
      above = (scores > bar) & (row != own) | (scores == bar) & (row < own)
      return jnp.sum(above & (row < size), axis=1, dtype=jnp.int32)

    return rank + jax.lax.map(count, (queries, bar, own))

  rank, q, own_ = (
    blocks(np.zeros_like(own, np.int32)),
    blocks(queries),
    blocks(own.astype(np.int32)),
  )
  bar = own_scores(q, blocks(parts[0][own]))
  stream = list(tiles.stream(parts, tiles.DOCUMENTS * len(devices)))
  for start, documents in tiles.progress(stream, "exact ranks"):
    padding = -len(documents) % (128 * len(devices))  # few distinct shapes to compile
    full = jax.device_put(np.pad(documents, ((0, padding), (0, 0))), sharded)
    rank = add(rank, q, bar, own_, full, start, len(documents))
  return np.asarray(rank).reshape(-1)[: len(queries)].astype(np.int64)
