"""Captions in, images out: each with the probability that it is relevant, and where to cut."""

import functools
import itertools
import pathlib

import numpy as np

from xe_retrieval import model as models
from xe_retrieval.calibration import artifact
from xe_retrieval.calibration.artifact import Calibration, Cut
from xe_retrieval.calibration.calibrator import Queries
from xe_retrieval.data import decoding
from xe_retrieval.search import asking
from xe_retrieval.search.asking import DIGITS, Ask, Query
from xe_retrieval.search.collection import Collection

BATCH = 256  # queries at once
CUT = ("min_probability", "max_wrong", "min_precision", "threshold", "guarantee")
UNFAMILIAR = np.log(0.5)  # log π from which a query counts as unlike what the model was trained on


class Searcher:
  """A collection, the model that embedded it, and what its scores mean, if it was evaluated."""

  def __init__(self, collection: Collection, model, calibration: Calibration | None):
    self.collection, self.model, self.calibration = collection, model, calibration
    self.meaning = calibration and calibration.best.at(len(collection))
    self.words = calibration and calibration.words and calibration.words.at(len(collection))
    # Bounds at every level take a millisecond; clients repeat their options.
    self.cut = functools.lru_cache(256)(self._cut)

  def _cut(
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
      source, how = self.collection.manifest["workdir"], "--workdir={} does that"
      if self.model.config.get("steps") == 0:  # a stock CLIP has no data of its own
        how = "--pretrained={} --dataset=… writes a workdir that can be indexed in its place"
      raise ValueError(
        "which scores are relevant is not known, as this model was not evaluated: "
        f"python -m xe_retrieval.evaluate {how.format(source)}; or give a threshold"
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

  def picture(self, image) -> np.ndarray:
    """A file, its bytes, an array or a PIL image -> float32 [width]: its product with any vector of
    the collection is a cosine."""
    square = decoding.square(image, view=decoding.View.of(self.model.config.image))
    vector = self.model.scoring.image(self.model.embed_squares([square[None]], 1))
    return self.model.scoring.plain(vector)[0]

  def meaning_of(self, query: Query):
    return self.words if query.words else self.meaning

  def threshold(self, query: Query | None, cut: Cut) -> float | None:
    """The score that results need, rounded up; None: the cut cannot be reached."""
    threshold = cut.score
    if query and query.known is not None and cut.logit is not None:
      calibrator = self.meaning_of(query).calibrator
      threshold = float(calibrator.score([cut.logit], query.known)[0, 0])
    return None if threshold is None else _rounded(threshold, np.ceil)

  def score_at(self, query: Query, probability: float) -> float:
    """The score from which on images are relevant to the query with at least this probability."""
    return self.threshold(query, self.cut(min_probability=probability, words=query.words))

  def probabilities(self, query: Query | None, scores) -> list[float | None]:
    """Rounded scores [n] -> that each image is relevant, rounded down: a result that is shown
    reaches the threshold and the probability that were asked for."""
    if query is None or query.known is None or not len(scores):
      return [None] * len(scores)
    meaning = self.meaning_of(query)
    logits = meaning.calibrator.logit(np.asarray(scores)[None], query.known)[0]
    return _shown(meaning.probability(logits, len(self.collection)))

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

  def answers(self, queries=None, image=None, **asked):
    """Strings, or a picture, or both -> what `search --json` prints.

    `asked` are the arguments of `cut`, of `Collection.where` and fields of `Ask`.
    """
    if queries is not None:
      rest = iter(queries)
      queries = iter(lambda: list(itertools.islice(rest, BATCH)), [])
    return self.answer_batches(queries, image, **asked)

  def answer_batches(self, batches, image=None, folder="", since=None, until=None, **asked):
    """The same of lists of strings, each answered as it comes; None: a picture alone."""
    cut = {name: asked.pop(name) for name in CUT if name in asked}
    cuts = {None: picture_cut(**cut)} if batches is None else self.cuts(**cut)
    where = self.collection.where(folder, since, until)
    like = None if image is None else self.picture(image)
    for batch in [[None]] if batches is None else map(self.embed, batches):
      asks = [Ask(q, cuts[q and q.words], where=where, like=like, **asked) for q in batch]
      yield from map(self._answer, asking.answer(self, asks))

  def _answer(self, found):
    results = [
      {"image": about["path"], "score": float(score), "probability": p}
      | ({} if likeness is None else {"likeness": likeness})
      for about, score, p, likeness in zip(
        self.collection.describe(found.ids[: found.results]),
        found.scores,
        found.probabilities,
        found.likeness,
        strict=False,
      )
    ]
    return asking.summary(found) | {"results": results}


def picture_cut(threshold=None, guarantee=False, **asked) -> Cut:
  """For a picture alone: all images, or those from a cosine on."""
  given = [name for name, value in asked.items() if value is not None]
  if given or guarantee:
    raise ValueError(
      f"{(given or ['guarantee'])[0]} is about words: how likely an image is relevant to a picture "
      "was not measured; give words too, or a threshold"
    )
  threshold = -1.0 if threshold is None else float(threshold)
  return Cut("score", threshold, score=threshold)


def _shown(probabilities) -> list[float]:
  """Rounded down; what has no more digits stays as it is."""
  floor = np.floor(np.round(np.asarray(probabilities, float) * 10**DIGITS, 5))
  return np.round(floor / 10**DIGITS, DIGITS).tolist()


def _rounded(x, towards) -> float:
  """`towards` is np.floor or np.ceil; what has no more digits stays as it is."""
  return round(float(towards(round(x * 10**DIGITS, 5))) / 10**DIGITS, DIGITS)


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
