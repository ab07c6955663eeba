"""Captions in, images out: each with the probability that it is relevant, and where to cut."""

import dataclasses
import itertools
import pathlib

import numpy as np

from xe_retrieval import model as models
from xe_retrieval.calibration import artifact
from xe_retrieval.calibration.artifact import Calibration, Cut
from xe_retrieval.calibration.calibrator import Queries
from xe_retrieval.search.collection import Collection

BATCH = 256  # queries at once
DIGITS = 4  # of scores and probabilities, as shown
UNFAMILIAR = np.log(0.5)  # log π from which a query counts as unlike what the model was trained on


@dataclasses.dataclass(frozen=True)
class Query:
  """A query before it is answered: the same for every cut and every collection."""

  text: str
  vector: np.ndarray  # float32 [width], see bank.Scoring
  known: Queries | None  # of one query; None: the model is not calibrated
  words: bool  # a few known ones: another kind of query than a caption, with another meaning
  familiar: bool
  suggestions: list[str]  # training captions nearest to an unfamiliar query


@dataclasses.dataclass(frozen=True)
class Found:
  """What one query gets. Results and near misses are rows of the collection, best first."""

  query: Query
  cut: Cut
  threshold: float | None  # the score that this query needs; None: the cut cannot be reached
  rows: np.ndarray  # int64 [k]
  scores: np.ndarray  # float64 [k], rounded
  probabilities: list[float | None]  # [k]
  above: int  # how many of the rows are results; the others are near misses


class Searcher:
  """A collection, the model that embedded it, and what its scores mean, if it was evaluated."""

  def __init__(self, collection: Collection, model, calibration: Calibration | None):
    self.collection, self.model, self.calibration = collection, model, calibration
    self.meaning = calibration and calibration.best.at(len(collection))
    self.words = calibration and calibration.words and calibration.words.at(len(collection))

  def cut(
    self,
    min_probability=None,
    max_wrong=None,
    min_precision=None,
    threshold=None,
    guarantee=False,
    words=False,
  ) -> Cut:
    """Which results are returned: asked for in one of four ways; by default probability 0.5.

    `words` is for queries of a few words, of which other things are to be expected.
    """
    given = {
      "min_probability": min_probability,
      "max_wrong": max_wrong,
      "min_precision": min_precision,
      "threshold": threshold,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
      raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
    if guarantee and "min_precision" not in given:
      raise ValueError("guarantee needs min_precision, the precision that is to be guaranteed")
    if threshold is not None:
      return Cut("score", float(threshold), score=float(threshold))
    if self.calibration is None:
      workdir = self.collection.manifest["workdir"]
      raise ValueError(
        "which scores are relevant is not known, as this model was not evaluated: "
        f"python -m xe_retrieval.evaluate --workdir={workdir} does that; or give a threshold"
      )
    meaning = self.words if words else self.meaning
    return meaning.cut(len(self.collection), guarantee=guarantee, **given)

  def cuts(self, **asked) -> dict[bool, Cut]:
    """The cut for captions, and for queries of a few words (True) where these are known."""
    kinds = (False, True) if self.words else (False,)
    return {words: self.cut(**asked, words=words) for words in kinds}

  def embed(self, queries: list[str]) -> list[Query]:
    vectors, features = self.model.embed_queries(queries)
    vectors = self.model.scoring.text(vectors, features)
    if self.calibration is None:
      return [
        Query(text, v, None, False, True, []) for text, v in zip(queries, vectors, strict=True)
      ]
    known = self.calibration.queries(queries, vectors, features)
    familiar = self.meaning.calibrator.log_familiar(known.familiarity) > UNFAMILIAR
    out = []
    for q, text in enumerate(queries):
      one = slice(q, q + 1)
      if self.calibration.are_words(text):
        described = self.calibration.vocabulary.describe([text], vectors[one])
        out.append(Query(text, vectors[q], described, True, True, []))
      else:
        near = [] if familiar[q] else self.calibration.bank.nearest(features[one])[0]
        out.append(Query(text, vectors[q], known[one], False, bool(familiar[q]), near))
    return out

  def nearest(self, vectors, top):
    """float32 [Q, width] -> int64 [Q, k], float32 [Q, k], with k ≤ top, best first."""
    return self.collection.search(vectors, max(top, 1))

  def found(self, query: Query, rows, scores, cut: Cut) -> Found:
    """Scores of a query's nearest images, best first -> which of them are results.

    All of them are rounded here, each to the side that keeps them consistent as they are shown:
    results are what reaches the threshold, and what reaches the probability.
    """
    scores = np.round(np.asarray(scores, np.float64), DIGITS)
    probabilities = [None] * len(scores)
    threshold = cut.score
    if query.known is not None:
      meaning = self.words if query.words else self.meaning
      logits = meaning.calibrator.logit(scores[None], query.known)[0]
      shown = meaning.probability(logits, len(self.collection))
      probabilities = _shown(shown)
      if cut.logit is not None:
        threshold = float(meaning.calibrator.score([cut.logit], query.known)[0, 0])
    if threshold is not None:
      threshold = _rounded(threshold, np.ceil)
    above = 0 if threshold is None else int(np.count_nonzero(scores >= threshold))
    return Found(query, cut, threshold, rows, scores, probabilities, above)

  def caption_probabilities(self, vectors, scores) -> list[float | None]:
    """Captions float32 [n, width] with one image's score each -> that it is relevant to each."""
    if self.calibration is None or not len(scores):
      return [None] * len(scores)
    level = (
      self.calibration.bank.level(vectors) if self.calibration.bank else np.zeros((2, len(scores)))
    )
    known = Queries(*level, np.full(len(scores), np.inf))  # captions of the collection are familiar
    meaning = self.meaning
    logits = meaning.calibrator.logit(np.asarray(scores)[:, None], known)[:, 0]
    return _shown(meaning.probability(logits, len(self.collection)))

  def search(self, queries: list[str], top: int, cuts: dict[bool, Cut]) -> list[Found]:
    """The `top` nearest images of each query, above the cut of its kind (words or not) or not."""
    embedded = self.embed(queries)
    rows, scores = self.nearest(np.stack([q.vector for q in embedded]), top)
    return [
      self.found(query, *x, cuts[query.words])
      for query, *x in zip(embedded, rows, scores, strict=True)
    ]

  def answers(self, queries, top=20, **asked):
    """Strings, from a list or as they come -> what `search --json` prints, in batches.

    `asked` are the arguments of `cut`.
    """
    cuts = self.cuts(**asked)
    queries = iter(queries)
    while batch := list(itertools.islice(queries, BATCH)):
      for found in self.search(batch, top, cuts):
        yield self._answer(found, top)

  def _answer(self, found, top):
    results = [
      {"image": self.collection.full_name(row), "score": float(score), "probability": p}
      for row, score, p in zip(found.rows, found.scores, found.probabilities, strict=True)
    ]
    return summary(found) | {"results": results[: min(found.above, top)]}


def _shown(probabilities) -> list[float]:
  return [_rounded(p, np.floor) for p in probabilities]


def _rounded(x, towards) -> float:
  """`towards` is np.floor or np.ceil; what has no more digits stays as it is."""
  return round(float(towards(round(x * 10**DIGITS, 5))) / 10**DIGITS, DIGITS)


def summary(found: Found) -> dict:
  """What is said of a query beside its results."""
  return {
    "query": found.query.text,
    "relevant": found.above > 0,
    "words": found.query.words,
    "familiar": found.query.familiar,
    "suggestions": found.query.suggestions,
    "threshold": found.threshold,
    "best_score": float(found.scores[0]),
    "best_probability": found.probabilities[0],
    "expect": found.cut.expect,
  }


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
  # The model's current calibration, or the one that was known when the index was made.
  calibration = artifact.read(workdir, fingerprint)
  calibration = calibration or artifact.read(collection.directory, fingerprint)
  return Searcher(collection, model, calibration)
