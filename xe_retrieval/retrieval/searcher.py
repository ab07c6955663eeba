"""Captions in, images out: those above one threshold, each with the precision to expect there."""

import dataclasses
import pathlib

import numpy as np

from xe_retrieval import model as models
from xe_retrieval.retrieval import cutoff
from xe_retrieval.retrieval.collection import Collection


@dataclasses.dataclass(frozen=True)
class Found:
  """What one query gets. Results and near misses are rows of the collection, best first."""

  query: str
  threshold: float
  best: float  # the highest score of any image
  rows: np.ndarray  # int64 [k]
  scores: np.ndarray  # float32 [k]

  @property
  def above(self) -> int:
    """How many of the rows are results; the others are near misses."""
    return int(np.count_nonzero(self.scores >= self.threshold))


class Searcher:
  """A collection, the model that embedded it, and its thresholds, if it was evaluated."""

  def __init__(self, collection: Collection, model, cutoffs: cutoff.Cutoffs | None):
    self.collection, self.model, self.cutoffs = collection, model, cutoffs

  def threshold(self, min_precision=None, threshold=None) -> float:
    """The cosine to cut at: given, or for a precision, or at the best F1 of the evaluation."""
    if threshold is not None and min_precision is not None:
      raise ValueError("a threshold or a precision, not both")
    if threshold is not None:
      return float(threshold)
    if self.cutoffs is None:
      workdir = self.collection.manifest["workdir"]
      raise ValueError(
        "which scores are relevant is not known, as this model was not evaluated: "
        f"python -m xe_retrieval.evaluate --workdir={workdir} does that; or give a threshold"
      )
    wanted = self.cutoffs.default if min_precision is None else min_precision
    return self.cutoffs.at_precision(wanted)

  def precision(self, scores) -> list[float | None]:
    """[k] -> what to expect of returning everything from this score on; None if not evaluated."""
    if self.cutoffs is None:
      return [None] * len(scores)
    return [round(float(p), 4) for p in self.cutoffs.precision_at(scores)]

  def embed(self, queries: list[str]) -> np.ndarray:  # [Q] -> float32 [Q, D]
    return self.model.embed_text(queries, progress=False)

  def nearest(self, vectors, top):
    """float32 [Q, D] -> int64 [Q, k], float32 [Q, k], with k ≤ top, best first."""
    return self.collection.search(vectors, max(top, 1))

  def search(self, queries: list[str], top: int, threshold: float) -> list[Found]:
    """The `top` nearest images of each query, above the threshold or not."""
    rows, scores = self.nearest(self.embed(queries), top)
    return [
      Found(query, threshold, float(scores[q, 0]), rows[q], scores[q])
      for q, query in enumerate(queries)
    ]


def open_index(path, workdir="", model=None) -> Searcher:
  """The index at `path` with its model: that of `workdir`, or of the run that it was made with."""
  collection = Collection(path)
  fingerprint = collection.manifest["model"]
  workdir = pathlib.Path(workdir or collection.manifest["workdir"])
  if model is None or model.fingerprint() != fingerprint:
    try:
      model = models.load(workdir)
    except ValueError as e:
      raise ValueError(f"{e}; --workdir names where the model of this index is now") from e
    if model.fingerprint() != fingerprint:
      raise ValueError(
        f"{path} was made with another model than {workdir} now holds; "
        "python -m xe_retrieval.index --rebuild embeds it anew"
      )
  # The latest evaluation of this model, or the one that was known when the index was made.
  cutoffs = cutoff.of_model(workdir, fingerprint)
  cutoffs = cutoffs or cutoff.of_model(collection.directory, fingerprint)
  return Searcher(collection, model, cutoffs)
