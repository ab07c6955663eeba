"""ScaNN: the nearest of many vectors by dot product, approximately, tuned to a stated recall.

index = build(vectors, queries=some_queries)
rows, scores = index.search(queries, 10)
index.save("index/ann"); load("index/ann", vectors)
"""

import concurrent.futures
import functools
import json
import math
import pathlib

import numpy as np

from xe_retrieval.evaluation import score_tiles
from xe_retrieval.preparation import cores
from xe_retrieval.search.stores import nearest

TREE_FROM = 100_000  # vectors; below, hashing alone is fast enough
TARGET = 0.972  # share of the true ten nearest that a tuned index finds
_QUERIES = 8_192  # that ScaNN is asked together
_AT_ONCE = 8_192  # candidates that a thread scores together
REORDER = 30  # candidates that get their exact score, if that is enough; see _tune


class ScannIndex:
  """A ScaNN searcher by row number: without a table of ids, which ScaNN would pickle.

  ScaNN holds hashes only. Candidates are scored with `vectors` [N, D], which may be mapped from a
  file.
  """

  def __init__(self, searcher, vectors, settings):
    self._searcher, self._vectors, self.settings = searcher, vectors, settings

  def __len__(self):
    return len(self._vectors)

  def search(self, queries, k):
    """[Q, D] -> int64 [Q, k] rows, float32 [Q, k] scores, best first."""
    if k > len(self):
      raise ValueError(f"asked for {k} neighbours, but the index holds {len(self)} vectors")
    queries = score_tiles.embeddings("queries", queries)
    candidates = min(max(self.settings["reorder"], 3 * k), len(self))
    found = [
      self._search(queries[i : i + _QUERIES], k, candidates)
      for i in range(0, len(queries), _QUERIES)
    ]
    rows, scores = zip(*found, strict=True)
    return np.concatenate(rows), np.concatenate(scores)

  def _search(self, queries, k, candidates):
    for leaves in (self.settings["leaves_to_search"], self.settings["leaves"]):
      rows, rough = self._searcher.search_batched_parallel(
        queries, candidates, None, leaves or None
      )
      missing = np.isnan(rough)
      if not missing[:, k - 1].any():  # else these leaves hold fewer than k vectors: take all
        break

    def exact(some):
      vectors = np.take(self._vectors, rows[some], axis=0, mode="clip")  # [q, candidates, D]
      scores = np.vecdot(vectors.astype(np.float32, copy=False), queries[some, None])
      scores[missing[some]] = -np.inf
      order = np.lexsort((rows[some], -scores), axis=1)[:, :k]
      return np.take_along_axis(rows[some], order, 1), np.take_along_axis(scores, order, 1)

    at_once = max(1, _AT_ONCE // candidates)
    parts = [slice(i, i + at_once) for i in range(0, len(queries), at_once)]
    found = map(exact, parts) if len(parts) == 1 else _threads().map(exact, parts)
    rows_found, scores = zip(*found, strict=True)
    return np.concatenate(rows_found).astype(np.int64), np.concatenate(scores)

  def save(self, directory):
    """ScaNN's own files and index.json; no pickle."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    self._searcher.serialize(str(directory), relative_path=True)
    about = {"kind": "scann", "vectors": len(self), "settings": self.settings}
    (directory / "index.json").write_text(json.dumps(about, indent=2) + "\n")


def build(vectors, queries=None) -> ScannIndex:
  """[N, D] -> an index of them, which goes on reading them.

  `queries` [Q, D] are a sample of what will be asked: ScaNN looks as far as it takes to find TARGET
  of their neighbours.
  """
  vectors = score_tiles.embeddings("vectors", vectors)
  chosen = settings(len(vectors))
  builder = _scann().builder(vectors, 10, "dot_product")
  if chosen["leaves"]:
    builder = builder.tree(
      chosen["leaves"],
      chosen["leaves"] // 10,
      training_sample_size=min(len(vectors), 100 * chosen["leaves"]),
      soar_lambda=1.5 if chosen["soar"] else None,
      overretrieve_factor=1.8 if chosen["soar"] else None,
    )
  builder = builder.score_ah(
    chosen["hash_block"], anisotropic_quantization_threshold=chosen["anisotropic"]
  )
  index = ScannIndex(builder.build(), vectors, chosen)
  _tune(index, vectors, queries)
  return index


def load(directory, vectors) -> ScannIndex:
  """The index of these vectors that was saved there; refuses ScaNN's own pickle of ids."""
  directory = pathlib.Path(directory)
  if not (directory / "index.json").exists():
    raise ValueError(f"{directory} holds no index: it has no index.json")
  if (directory / "scann_docids.pkl").exists():
    raise ValueError(
      f"{directory} holds scann_docids.pkl, a pickle, which may run anything: refused"
    )
  about = json.loads((directory / "index.json").read_text())
  searcher = _scann().load_searcher(str(directory))
  return ScannIndex(searcher, vectors, about["settings"])


def settings(count):
  """How ScaNN is built for that many vectors, before it is tuned to them."""
  tree = count >= TREE_FROM
  leaves = 2 * round(math.sqrt(count)) if tree else 0  # twice as many are no faster to search
  return {
    "leaves": leaves,
    "leaves_to_search": leaves,
    "soar": tree,
    "hash_block": 2,
    "anisotropic": 0.2,
    "reorder": REORDER,
  }


def overlap(found, exact):
  """Row numbers [Q, k] twice -> share of the exact ones that were found."""
  return float((found[:, :, None] == exact[:, None, :]).any(axis=1).mean())


@functools.cache
def _threads():
  return concurrent.futures.ThreadPoolExecutor(cores.available(), "scann")


def _scann():
  from xe_retrieval.data import cpu_tensorflow  # noqa: F401 scann loads TensorFlow: without devices

  from scann.scann_ops.py import scann_ops_pybind  # isort: skip

  return scann_ops_pybind


def _tune(index, vectors, queries):
  """The fewest candidates, then the fewest leaves, that find TARGET of the ten nearest."""
  random, chosen = np.random.default_rng(0), index.settings
  width, k = vectors.shape[1], min(10, len(vectors))
  asked = vectors if queries is None else score_tiles.embeddings("queries", queries, width)
  asked = asked[random.permutation(len(asked))[:500]]
  exact, _ = nearest.nearest(vectors, asked, k)

  def found():
    return overlap(index.search(asked, k)[0], exact)

  while found() < (1 + TARGET) / 2 and chosen["reorder"] < 32 * REORDER:  # with all leaves
    chosen["reorder"] *= 2
  leaves = 10
  while leaves < chosen["leaves"]:
    chosen["leaves_to_search"] = leaves
    if found() >= TARGET:
      return
    leaves = math.ceil(leaves * 1.1)
  chosen["leaves_to_search"] = chosen["leaves"]
