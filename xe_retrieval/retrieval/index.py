"""Nearest vectors by dot product: exactly when there are few, by ScaNN when there are many.

index = build(vectors, ids, queries=some_queries)
ids, scores = index.search(queries, 10)
index.add(more_vectors, more_ids); index.save("runs/ce/index"); load("runs/ce/index")
"""

import json
import math
import pathlib

import numpy as np

from xe_retrieval.retrieval import tiles

EXACT_BELOW = 20_000  # brute force answers as fast as one wishes
TREE_FROM = 100_000  # below, hashing alone
TARGET = 0.972  # of the true ten nearest, that a tuned index finds
REORDER = 60  # candidates that get their exact score, if that is enough; see _tune


class Index:
  """Vectors with ids. `kind` is exact or scann; `settings` is what it was built with."""

  def __init__(self, engine, ids, kind, settings):
    self._engine, self.ids, self.kind, self.settings = engine, ids, kind, settings

  def __len__(self):
    return len(self.ids)

  def search(self, queries, k):
    """[Q, D] -> ids [Q, k], float32 [Q, k] scores, best first."""
    rows, scores = self.search_rows(queries, k)
    return self.ids[rows], scores

  def search_rows(self, queries, k):
    """The same with int64 row numbers in the order of adding."""
    if k > len(self):
      raise ValueError(f"asked for {k} neighbours, but the index holds {len(self)} vectors")
    return self._engine.search(tiles.embeddings("queries", queries), k)

  def add(self, vectors, ids=None):
    """More vectors, without building anew. Without ids they are numbered on."""
    vectors = tiles.embeddings("vectors", vectors)
    ids = _ids(ids, len(vectors), start=len(self))
    if len(both := np.concatenate([self.ids, ids])) != len(np.unique(both)):
      raise ValueError("ids must be new: some of them are in the index already")
    self._engine.add(vectors)
    self.ids = both

  def save(self, directory):
    """index.json, ids.npy and the engine's own files; no pickle."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    self._engine.save(directory)
    np.save(directory / "ids.npy", self.ids, allow_pickle=False)
    about = {"kind": self.kind, "vectors": len(self), "settings": self.settings}
    (directory / "index.json").write_text(json.dumps(about, indent=2) + "\n")


def build(vectors, ids=None, kind="auto", queries=None, stored=True):
  """[N, D], N ids (int or str; row numbers if None) -> Index.

  `kind`: auto (exact below EXACT_BELOW vectors), exact, scann. `queries` [Q, D] are a sample of
  what will be asked: ScaNN looks as far as it takes to find TARGET of their neighbours. Without
  `stored`, ScaNN holds hashes only and reads candidates from `vectors`, which may be mapped from a
  file; `load` is then given them again.
  """
  vectors = tiles.embeddings("vectors", vectors)
  ids = _ids(ids, len(vectors))
  if len(ids) != len(np.unique(ids)):
    raise ValueError("ids must be distinct")
  if kind == "auto":
    kind = "exact" if len(vectors) < EXACT_BELOW else "scann"
  if kind == "exact":
    return Index(_Exact([vectors]), ids, kind, {})
  if kind != "scann":
    raise ValueError(f"index kind {kind!r} should be auto, exact or scann")
  engine = _Scann.build(vectors, settings(len(vectors)), stored)
  _tune(engine, vectors, queries)
  return Index(engine, ids, kind, engine.settings)


def load(directory, vectors=None):
  """Index that was saved there; refuses ScaNN's own pickle of ids."""
  directory = pathlib.Path(directory)
  if not (directory / "index.json").exists():
    raise ValueError(f"{directory} holds no index: it has no index.json")
  if (directory / "scann_docids.pkl").exists():
    raise ValueError(
      f"{directory} holds scann_docids.pkl, a pickle, which may run anything: refused"
    )
  about = json.loads((directory / "index.json").read_text())
  ids = np.load(directory / "ids.npy", allow_pickle=False)
  if about["kind"] == "exact":
    vectors = np.load(directory / "vectors.npy", allow_pickle=False)
    return Index(_Exact([vectors]), ids, "exact", {})
  engine = _Scann.load(directory, about["settings"], vectors)
  return Index(engine, ids, "scann", about["settings"])


def settings(count):
  """How ScaNN is built for that many vectors, before it is tuned to them."""
  tree = count >= TREE_FROM
  leaves = 4 * round(math.sqrt(count)) if tree else 0
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


class _Exact:
  """Brute force, streaming."""

  def __init__(self, parts):
    self.parts = parts  # [[n, D]]

  def search(self, queries, k):
    rows = np.zeros((len(queries), k), np.int64)
    best = np.full((len(queries), k), -np.inf, np.float32)
    scratch = np.empty(tiles.QUERIES * tiles.DOCUMENTS, np.float32)
    stream = list(tiles.stream(self.parts, tiles.DOCUMENTS))
    for start, documents in tiles.progress(stream, "exact search"):
      for span in tiles.spans(len(queries), tiles.QUERIES):
        scores = np.hstack([best[span], tiles.product(queries[span], documents, scratch)])
        at = np.argpartition(scores, -k, axis=1)[:, -k:]
        best[span] = np.take_along_axis(scores, at, axis=1)
        known = np.take_along_axis(rows[span], np.minimum(at, k - 1), axis=1)
        rows[span] = np.where(at < k, known, at - k + start)
    order = np.lexsort((rows, -best), axis=1)
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(best, order, axis=1)

  def add(self, vectors):
    self.parts = [*self.parts, vectors]

  def save(self, directory):
    np.save(directory / "vectors.npy", np.concatenate(self.parts), allow_pickle=False)


class _Scann:
  """A ScaNN searcher without its table of ids, which it would pickle."""

  def __init__(self, searcher, settings, vectors=None):
    self.searcher, self.settings = searcher, settings
    self.vectors = vectors  # [N, D] to score candidates with; None: ScaNN has its own

  @classmethod
  def build(cls, vectors, chosen, stored=True):
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
    if not stored:
      return cls(builder.build(), chosen, vectors)
    return cls(builder.reorder(chosen["reorder"]).build(), chosen)

  @classmethod
  def load(cls, directory, chosen, vectors=None):
    return cls(_scann().load_searcher(str(directory)), chosen, vectors)

  def search(self, queries, k):
    candidates = max(self.settings["reorder"], 3 * k)
    if self.vectors is not None:
      return self._search_mapped(queries, k, min(candidates, len(self.vectors)))
    for leaves in (self.settings["leaves_to_search"], self.settings["leaves"]):
      found = self.searcher.search_batched_parallel(queries, k, candidates, leaves or None)
      if not np.isnan(found[1]).any():  # else these leaves hold fewer than k vectors: take all
        break
    return found[0].astype(np.int64), found[1]

  def _search_mapped(self, queries, k, candidates):
    for leaves in (self.settings["leaves_to_search"], self.settings["leaves"]):
      rows, rough = self.searcher.search_batched_parallel(queries, candidates, None, leaves or None)
      if not np.isnan(rough[:, k - 1]).any():
        break
    rows, scores = rows.astype(np.int64), np.empty(rows.shape, np.float32)
    for q, query in enumerate(queries):
      scores[q] = self.vectors[rows[q]] @ query
    scores[np.isnan(rough)] = -np.inf
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)

  def add(self, vectors):
    # The searcher below the Python wrapper numbers on by itself where it gets no number.
    self.searcher.searcher.upsert([None] * len(vectors), vectors, 256)

  def save(self, directory):
    self.searcher.serialize(str(directory), relative_path=True)


def _scann():
  from xe_retrieval.data import cpu_tensorflow  # noqa: F401 scann loads TensorFlow: without devices

  from scann.scann_ops.py import scann_ops_pybind  # isort: skip

  return scann_ops_pybind


def _tune(engine, vectors, queries):
  """The fewest candidates, then the fewest leaves, that find TARGET of the ten nearest."""
  random, chosen = np.random.default_rng(0), engine.settings
  asked = vectors if queries is None else tiles.embeddings("queries", queries, vectors.shape[1])
  asked = asked[random.permutation(len(asked))[:500]]
  exact, _ = _Exact([vectors]).search(asked, 10)

  def found():
    return overlap(engine.search(asked, 10)[0], exact)

  while found() < (1 + TARGET) / 2 and chosen["reorder"] < 16 * REORDER:  # with all leaves
    chosen["reorder"] *= 2
  leaves = 10
  while leaves < chosen["leaves"]:
    chosen["leaves_to_search"] = leaves
    if found() >= TARGET:
      return
    leaves = math.ceil(leaves * 1.1)
  chosen["leaves_to_search"] = chosen["leaves"]


def _ids(ids, count, start=0):
  ids = np.arange(start, start + count) if ids is None else np.asarray(ids)
  if ids.shape != (count,) or ids.dtype.kind not in "iuU":
    raise ValueError(f"ids must be {count} integers or strings, not {ids.dtype} {list(ids.shape)}")
  return ids
