"""Answers in the shape of schema.py, and lists to export."""

import csv
import io
import json

import numpy as np

from xe_retrieval.calibration import artifact
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.search import asking

CURVE = 201  # scores at which a query's images are counted
_GRID = np.round(np.linspace(-1, 1, CURVE), 4)
OTHERS = 40  # captions whose curves are shown beside it


def images(searcher, ids) -> list[dict]:
  shown = ("id", "image", "folder", "date")
  return [
    {name: about[name] for name in shown} | {"url": f"image/{about['id']}"}
    for about in searcher.collection.describe(ids)
  ]


def search(searcher, found: asking.Found, like: str | None) -> dict:
  hits = [
    about | {"score": float(score), "probability": p, "likeness": likeness}
    for about, score, p, likeness in zip(
      images(searcher, found.ids),
      found.scores,
      found.probabilities,
      found.likeness,
      strict=True,
    )
  ]
  return asking.summary(found) | {
    "like": like,
    "levels": found.levels,
    "generation": searcher.collection.manifest["generation"],
    "results": hits[: found.results],
    "near_misses": hits[found.results :],
  }


def reranked(searcher, query, ids, scores, probabilities) -> dict:
  places = [
    {"id": f"{int(id):016x}", "score": _rounded(score), "probability": _rounded(p)}
    for id, score, p in zip(ids, scores, probabilities, strict=True)
  ]
  return {
    "query": query.text,
    "results": places,
    "generation": searcher.collection.manifest["generation"],
  }


def similar(searcher, id, top) -> dict:
  """Images that look like one, and captions of the collection that fit it, the likeliest first."""
  collection = searcher.collection
  vector = collection.store.vectors(np.array([id]))
  alone = searcher.model.scoring.plain(vector)  # images among each other: cosines
  ids, scores = (x[0] for x in collection.search(alone, top + 1))
  ids, scores = ids[np.isfinite(scores)], scores[np.isfinite(scores)]
  numbers, fits = (x[0] for x in collection.search_captions(vector, top))
  shown = searcher.caption_probabilities(collection.caption_vectors[numbers], fits)
  captions = [
    {"caption": collection.captions[int(i)], "score": _rounded(score), "probability": p}
    for i, score, p in zip(numbers, fits, shown, strict=True)
  ]
  others = [
    about | {"score": _rounded(s)}
    for about, s, other in zip(images(searcher, ids), scores, ids, strict=True)
    if other != id
  ]
  return {
    "image": images(searcher, np.array([id]))[0],
    "images": others[:top],
    "captions": sorted(captions, key=lambda c: (-(c["probability"] or 0), -c["score"])),
  }


def curve(searcher, query, others) -> dict:
  """How many images have at least each score; `others` int [n, CURVE] are those of captions."""
  scores, images = curves(searcher, query.vector[None])
  return {
    "query": query.text,
    "scores": scores.tolist(),
    "images": images[0].tolist(),
    "thresholds": None
    if query.known is None
    else [searcher.score_at(query, p) for p in asking.PERCENTS.tolist()],
    "others": others.tolist(),
    "images_in_all": len(searcher.collection),
  }


def other_curves(searcher):
  """int [≤ OTHERS, CURVE]: of captions of the collection, or else of the bank; none of an engine
  that would have to list its scores for each of them."""
  collection, bank = searcher.collection, searcher.calibration and searcher.calibration.bank
  if len(collection.captions):
    at = np.unique(np.linspace(0, len(collection.captions) - 1, OTHERS).astype(int))
    vectors = np.asarray(collection.caption_vectors[at])
  elif bank:
    texts = bank.captions[:: max(len(bank.captions) // OTHERS, 1)][:OTHERS]
    vectors = np.stack([query.vector for query in searcher.embed(texts)])
  else:
    return np.zeros((0, CURVE), int)
  found = collection.store.histogram(vectors, _GRID)
  return np.zeros((0, CURVE), int) if found is None else found


def curves(searcher, vectors):
  """float32 [q, width] -> scores [CURVE], int [q, CURVE] images that reach each."""
  store = searcher.collection.store
  found = store.histogram(vectors, _GRID)
  if found is None:
    return _GRID, np.stack([_counted(store, vector, _GRID) for vector in vectors])
  return _GRID, found


def _counted(store, vector, grid):
  """int [CURVE], from the longest list of scores that the engine gives; below it, all images."""
  low, high, at, scores = 0, len(grid), 0, np.zeros(0)  # first, whether all can be listed
  while low < high:
    found = store.above(vector[None], [grid[at]])[0]
    if found is None:
      low = at + 1
    else:
      high, scores = at, found
    at = (low + high) // 2
  counts = len(scores) - np.searchsorted(np.sort(scores), grid.astype(np.float32))
  return np.where(np.arange(len(grid)) < low, len(store), counts)


def calibration(searcher) -> dict:
  """What probabilities were measured on, and what to expect of each minimum probability."""
  known, best = searcher.calibration, searcher.meaning
  return {
    "measured_on": known.measured_on(),
    "relevance": best.relevance,
    "images": best.counts.images,
    "default": artifact.DEFAULT_PROBABILITY,
    "bank": known.bank is not None,
    **_meaning(searcher, best),
    "words": searcher.words and _meaning(searcher, searcher.words),
  }


def _meaning(searcher, meaning):
  images = len(searcher.collection)
  percents = [percent / 100 for percent in range(1, 100)]
  return {
    "relevant": relevances.MEANING[meaning.relevance],
    "expect": [{"min_probability": p} | meaning.cut(images, p).expect for p in percents],
  }


def examples(captions) -> list[str]:
  """Up to six example queries: captions spread over the collection, or over the bank."""
  at = np.unique(np.linspace(0, len(captions) - 1, 60).astype(int)) if len(captions) else []
  texts = dict.fromkeys(captions[int(i)] for i in at)  # each once
  texts = [text for text in texts if 8 <= len(text) <= 60]
  return texts[:: max(len(texts) // 6, 1)][:6]


def export(searcher, found: asking.Found, kind: str) -> tuple[str, str]:
  """All results -> (content, media type)."""
  rows = [
    {
      "path": about["path"],
      "probability": p,
      "score": float(score),
      "likeness": likeness,
      "date": about["date"],
    }
    for about, p, score, likeness in zip(
      searcher.collection.describe(found.ids[: found.results]),
      found.probabilities,
      found.scores,
      found.likeness,
      strict=False,
    )
  ]
  if kind == "json":
    return json.dumps(asking.summary(found) | {"results": rows}), "application/json"
  if kind == "txt":
    return "".join(f"{row['path']}\n" for row in rows), "text/plain; charset=utf-8"
  out = io.StringIO()
  writer = csv.DictWriter(out, ["path", "probability", "score", "likeness", "date"])
  writer.writeheader()
  writer.writerows(rows)
  return out.getvalue(), "text/csv; charset=utf-8"


def _rounded(score):
  return round(float(score), asking.DIGITS)
