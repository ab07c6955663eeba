"""What is asked of a collection and what it answers: words, a picture, or both.

Words decide what is relevant. A picture alone has no threshold: all images are answered, the most
alike first. With both, words decide what is relevant, and the order is that of

    weight · words + (1 − weight) · picture

of the two scores, each divided by its standard deviation among the relevant images.
"""

import dataclasses

import numpy as np

from xe_retrieval.calibration.artifact import Cut

DIGITS = 4  # of scores and probabilities, as shown
PERCENTS = np.arange(1, 100) / 100
ORDERS = ("best", "date")


@dataclasses.dataclass(frozen=True)
class Query:
  """Words before they are answered: the same for every cut and every collection."""

  text: str
  vector: np.ndarray  # float32 [width], see bank.Scoring
  known: object | None  # calibrator.Queries of one query; None: the model is not calibrated
  words: bool  # a few known ones: another kind of query than a caption, with another meaning
  familiar: bool
  suggestions: list[str]  # training captions nearest to an unfamiliar query


@dataclasses.dataclass(frozen=True)
class Ask:
  query: Query | None
  cut: Cut
  top: int = 20
  offset: int = 0
  near: int = 0  # near misses
  order: str = "best"
  where: object | None = None  # a condition: which images are searched
  levels: bool = False  # also how many images reach each percent: looks at every image
  like: np.ndarray | None = None  # float32 [width] of a picture, as bank.Scoring.plain gives it
  weight: float = 0.5  # of the words, where there is a picture too
  without: int | None = None  # an id that is no result: the picture itself


@dataclasses.dataclass(frozen=True)
class Found:
  """One answer. Results and near misses are ids of images, best first."""

  ask: Ask
  threshold: float | None  # the score that results need; None: the cut cannot be reached
  ids: np.ndarray  # uint64 [n]: results, then near misses
  scores: np.ndarray  # float64 [n], rounded
  probabilities: list[float | None]  # [n]
  likeness: list[float | None]  # [n]: cosine to the picture
  results: int  # how many of these are results
  total: int | None  # results in all; None: an approximate index has not counted them
  best: tuple[float | None, float | None]  # score and probability of the best image
  levels: dict | None

  @property
  def relevant(self) -> bool:
    return self.total is None or self.total > 0


def answer(searcher, asks: list[Ask]) -> list[Found]:
  """Asks that search the same images share one pass over the vectors; those that need all of their
  results at once are answered alone, so that no more than these are held."""
  out = [None] * len(asks)
  groups = {}
  for i, ask in enumerate(asks):
    alone = i if _reordered(ask) else None
    groups.setdefault((ask.where, ask.levels, alone), []).append(i)
  for group in groups.values():
    some = [asks[i] for i in group]
    thresholds = [searcher.threshold(ask.query, ask.cut) for ask in some]
    least = [_least(searcher, *x) for x in zip(some, thresholds, strict=True)]
    vectors = np.stack([ask.like if ask.query is None else ask.query.vector for ask in some])
    depth = max(_depth(searcher, *x) for x in zip(some, vectors, thresholds, strict=True))
    exact = some[0].levels or _reordered(some[0])
    listed = _reordered(some[0]) or any(map(_has_levels, some))
    ids, scores, passing = searcher.collection.store.scan(
      vectors, depth, least, some[0].where, exact, listed
    )
    passing = passing or [None] * len(some)
    for i, *one in zip(group, some, thresholds, ids, scores, passing, strict=True):
      out[i] = _found(searcher, *one)
  return out


def _reordered(ask) -> bool:
  """Whether results are shown in another order than by score: any of them may be the first."""
  return ask.order != "best" or bool(ask.query and ask.like is not None)


def _has_levels(ask) -> bool:
  """Whether every score that passes is needed, and not only how many they are."""
  return ask.levels and ask.query is not None and ask.query.known is not None


def _depth(searcher, ask, vector, threshold):
  """How many of the nearest are needed."""
  more = ask.near + (ask.without is not None)
  if not _reordered(ask):
    return ask.offset + ask.top + more
  count = 0
  if threshold is not None:
    least = [_passing(threshold)]
    count = searcher.collection.store.count(vector[None], least, ask.where)[0]
  # At least one: the best is told also where it is no result.
  return len(searcher.collection) if count is None else max(count, 1) + more


def _passing(threshold):
  """Scores are rounded to DIGITS before they are compared."""
  return threshold - 10.0**-DIGITS


def _least(searcher, ask, threshold):
  """The lowest score that counts."""
  least = np.inf if threshold is None else _passing(threshold)
  if _has_levels(ask):
    return min(least, _passing(searcher.score_at(ask.query, PERCENTS[0])))
  return least


def _found(searcher, ask, threshold, ids, scores, passing):
  there = np.isfinite(scores)
  ids, scores = ids[there], scores[there]
  if ask.without is not None:
    kept = ids != ask.without
    if passing is not None and not kept.all():
      at = np.flatnonzero(np.abs(passing - scores[~kept][0]) < 10.0 ** -(DIGITS + 1))
      passing = np.delete(passing, at[:1])  # nothing, where it is below what counts itself
    ids, scores = ids[kept], scores[kept]
  scores = rounded(scores)
  above = 0 if threshold is None else int(np.count_nonzero(scores >= threshold))
  total = above
  if above == len(scores) > 0:  # there may be more than were looked for
    total = None if passing is None else int(np.count_nonzero(rounded(passing) >= threshold))
  everything = searcher.probabilities(ask.query, scores[:1])
  best = (float(scores[0]), everything[0]) if len(scores) else (None, None)
  order = _order(searcher, ask, ids[:above], scores[:above])
  chosen = np.concatenate(
    [
      order[ask.offset : ask.offset + ask.top],
      np.arange(above, above + ask.near) if above < ask.offset + ask.top else [],
    ]
  ).astype(np.int64)
  results = len(order[ask.offset : ask.offset + ask.top])
  chosen = chosen[chosen < len(ids)]
  ids, scores = ids[chosen], scores[chosen]
  return Found(
    ask,
    threshold,
    ids,
    scores,
    searcher.probabilities(ask.query, scores),
    _likeness(searcher, ask, ids).tolist() if ask.like is not None else [None] * len(ids),
    results,
    total,
    best,
    _levels(searcher, ask.query, passing) if ask.levels else None,
  )


def _order(searcher, ask, ids, scores):
  """int64 [n]: in which order the results are shown."""
  if ask.order == "date":
    return np.argsort(-searcher.collection.dates(ids), kind="stable")
  if ask.query is None or ask.like is None:
    return np.arange(len(ids))
  parts = scores, _likeness(searcher, ask, ids)
  words, picture = (x / (x.std() or 1) for x in parts) if len(ids) else parts
  return np.argsort(-(ask.weight * words + (1 - ask.weight) * picture), kind="stable")


def _likeness(searcher, ask, ids):
  return rounded(searcher.collection.store.vectors(ids) @ ask.like)


def _levels(searcher, query, passing):
  """How many images reach each percent, and how many of these are expected to be irrelevant."""
  if query is None or query.known is None or passing is None:
    return None
  p = np.sort(np.array(searcher.probabilities(query, rounded(passing)), float))
  at = np.searchsorted(p, PERCENTS - 1e-9)
  wrong = np.concatenate([np.cumsum((1 - p)[::-1])[::-1], [0.0]])
  return {"results": (len(p) - at).tolist(), "wrong": np.round(wrong[at], 2).tolist()}


def rounded(scores):
  return np.round(np.asarray(scores, np.float64), DIGITS)


def summary(found: Found) -> dict:
  """What is said of a query beside its results."""
  query = found.ask.query
  return {
    "query": query and query.text,
    "relevant": found.relevant,
    "total": found.total,
    "words": bool(query and query.words),
    "familiar": query is None or query.familiar,
    "suggestions": query.suggestions if query else [],
    "threshold": found.threshold,
    "best_score": found.best[0],
    "best_probability": found.best[1],
    "expect": found.ask.cut.expect,
  }
