"""The service behind the API: answers queries and reloads the index when it changes on disk."""

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import sys

import cachetools
import numpy as np

from xe_retrieval.calibration import artifact
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.search import searcher as searchers
from xe_retrieval.search.collection import MANIFEST
from xe_retrieval.serving import thumbnails
from xe_retrieval.serving.batching import Batcher, Busy
from xe_retrieval.towers import bank

LIMITS = {
  "query": 500,  # characters
  "batch": 64,  # queries per request
  "top": 200,
  "waiting": 256,  # queued queries; also thumbnails being made
  "address": 8_192,  # bytes
  "body": 262_144,
}
POLL = 1.0  # seconds between checks for a new index
_QUERY_CACHE = 4_096  # embedded queries
_CUT_CACHE = 256
_THUMBNAIL_CACHE = 64 << 20  # bytes


class InvalidRequest(Exception):
  """The request cannot be answered; the message says why."""


class UnknownImage(Exception):
  """No image has this id."""


class _Loaded:
  """A searcher and what is cached for it: replaced as a whole when the index is reloaded."""

  def __init__(self, searcher: searchers.Searcher):
    self.searcher = searcher
    self.queries = cachetools.LRUCache(_QUERY_CACHE)  # text -> searchers.Query
    # Bounds at every level take a millisecond; clients repeat their options.
    self.cut = functools.lru_cache(_CUT_CACHE)(searcher.cut)
    self.calibration = searcher.calibration and _calibration(searcher)


class Service:
  """Returns dicts in the shape of schema.py; raises InvalidRequest, UnknownImage or Busy."""

  def __init__(self, path, workdir="", poll=POLL, model=None):
    self.path, self.workdir, self._poll = pathlib.Path(path).expanduser(), workdir, poll
    before = _stamp(self.path / MANIFEST)
    self._current = _Loaded(searchers.open_index(path, workdir, model))
    # The stamp from before loading: a change during loading is picked up by the next poll.
    self._seen = [before, *self._signature()[1:]]
    self._thumbnails = cachetools.LRUCache(_THUMBNAIL_CACHE, lambda made: len(made[0]))
    self._queries = Batcher(self._answer, LIMITS["batch"], LIMITS["waiting"])
    self._decoding = 0  # thumbnails being made
    self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() + 1)

  @property
  def searcher(self) -> searchers.Searcher:
    return self._current.searcher

  def warm_up(self):
    """Compiles the text tower for every batch size."""
    count = 1
    while count <= LIMITS["batch"]:
      queries = self.searcher.embed(["a"] * count)
      self.searcher.nearest(np.stack([query.vector for query in queries]), 20)
      count *= 2

  # ---- answering ----

  async def search(self, queries, top, near, **asked):
    """`asked` are the arguments of Searcher.cut."""
    _cut(self._current, asked)  # rejects an invalid one before the work
    k = min(top + near, LIMITS["top"] * 2)
    answers = await self._queries.ask([(query, k) for query in queries])
    return [_response(*answer, asked, top, near) for answer in answers]

  async def similar(self, id, top):
    searcher = self.searcher
    row = _row(searcher, id)
    vector = np.asarray(searcher.collection.vectors[row])[None]
    alone = searcher.model.scoring.plain(vector)  # images among each other: cosines
    answers = await self._queries.ask([(alone, top + 1), (vector, -top)])
    # The index may have been swapped since: each answer names the searcher that its rows refer to.
    (owner, _, rows, scores), (caption_owner, _, *captions) = answers
    others = [
      _result(owner.searcher, r) | {"score": _round(s)} for r, s in zip(rows, scores, strict=True)
    ]
    return {
      "image": _result(searcher, row),
      "images": [other for other in others if other["id"] != id][:top],
      "captions": _captions(caption_owner.searcher, *captions),
    }

  def image(self, id):
    return _result(self.searcher, _row(self.searcher, id))

  def about(self):
    loaded = self._current
    collection = loaded.searcher.collection
    return {
      "images": len(collection),
      "captions": len(collection.captions),
      "generation": collection.manifest["generation"],
      "step": collection.manifest["step"],
      "scores": bank.in_words(loaded.searcher.model.scoring.correction),
      "calibration": loaded.calibration,
      "examples": _examples(collection.captions),
      "limits": LIMITS,
    }

  async def thumbnail(self, id, side):
    """Returns (bytes, media type), from the cache or decoded in the thread pool."""
    searcher = self.searcher
    row = _row(searcher, id)
    key = (id, side, tuple(searcher.collection.stamps[row].tolist()))
    if key in self._thumbnails:
      return self._thumbnails[key]
    if self._decoding >= LIMITS["waiting"]:
      raise Busy
    self._decoding += 1
    try:
      loop = asyncio.get_running_loop()
      made = await loop.run_in_executor(self._pool, _thumbnail, searcher.collection, row, side)
    finally:
      self._decoding -= 1
    if made is None:
      return thumbnails.PLACEHOLDER, "image/svg+xml"
    self._thumbnails[key] = made
    return made

  def _answer(self, jobs):
    """[(text or vector, k)] -> [(_Loaded, Query or None, rows, scores)]; k < 0: captions.

    Row numbers and queries are valid for the returned searcher only.
    """
    loaded = self._current
    searcher, cache = loaded.searcher, loaded.queries
    texts = {query for query, _ in jobs if isinstance(query, str)}
    embedded = {query: cache[query] for query in texts if query in cache}
    if new := list(texts - embedded.keys()):
      embedded |= zip(new, searcher.embed(new), strict=True)
      cache.update(embedded)
    queries = [embedded[q] if isinstance(q, str) else None for q, _ in jobs]
    vectors = [
      job[0] if query is None else query.vector[None]
      for job, query in zip(jobs, queries, strict=True)
    ]
    answers = [None] * len(jobs)
    for captions in (False, True):
      at = [i for i, (_, k) in enumerate(jobs) if (k < 0) == captions]
      if at:
        search = searcher.collection.search_captions if captions else searcher.nearest
        most = max(abs(jobs[i][1]) for i in at)
        rows, scores = search(np.concatenate([vectors[i] for i in at]), most)
        for n, i in enumerate(at):
          k = abs(jobs[i][1])
          answers[i] = loaded, queries[i], rows[n, :k].tolist(), scores[n, :k]
    return answers

  # ---- reloading the index ----

  @contextlib.asynccontextmanager
  async def watching(self):
    """Polls for a new index. Not inotify, which misses changes on network file systems."""
    task = asyncio.get_running_loop().create_task(self._watch())
    try:
      yield
    finally:
      task.cancel()

  async def _watch(self):
    loop = asyncio.get_running_loop()
    while True:
      await asyncio.sleep(self._poll)
      if (signature := self._signature()) != self._seen:
        self._seen = signature
        await loop.run_in_executor(self._pool, self._reload)

  def _reload(self):
    try:
      new = searchers.open_index(self.path, self.workdir, self.searcher.model)
    except (OSError, ValueError) as e:
      print(f"the new index was not loaded: {e}", file=sys.stderr, flush=True)
      return
    self._current = _Loaded(new)
    print(f"reloaded: {len(new.collection):,} images", file=sys.stderr, flush=True)

  def _signature(self):
    """Differs after a change of the index or of its model's calibration."""
    where = self.workdir or self.searcher.collection.manifest["workdir"]
    return [_stamp(self.path / MANIFEST), _stamp(pathlib.Path(where) / artifact.NAME)]


def _stamp(path):
  try:
    about = os.stat(path)
  except OSError:
    return None
  return about.st_mtime_ns, about.st_ino


def _cut(loaded, asked):
  try:
    return loaded.cut(**asked)
  except ValueError as e:
    raise InvalidRequest(str(e)) from e


def _response(loaded, query, rows, scores, asked, top, near):
  searcher = loaded.searcher
  found = searcher.found(query, rows, scores, _cut(loaded, asked | {"words": query.words}))
  hits = [
    _result(searcher, row) | {"score": _round(score), "probability": p}
    for row, score, p in zip(rows, scores, found.probabilities, strict=True)
  ]
  misses = hits[found.above : found.above + near] if found.above < top else []
  return searchers.summary(found) | {
    "results": hits[: min(found.above, top)],
    "near_misses": misses,
  }


def _captions(searcher, numbers, scores):
  """Captions of the collection that fit an image, the likeliest first."""
  collection = searcher.collection
  shown = searcher.caption_probabilities(collection.caption_vectors[numbers], scores)
  captions = [
    {"caption": collection.captions[i], "score": _round(score), "probability": p}
    for i, score, p in zip(numbers, scores, shown, strict=True)
  ]
  return sorted(captions, key=lambda c: (-(c["probability"] or 0), -c["score"]))


def _calibration(searcher):
  """What probabilities were measured on, and what to expect of each minimum probability."""
  calibration, best = searcher.calibration, searcher.meaning
  return {
    "measured_on": calibration.measured_on(),
    "relevance": best.relevance,
    "images": best.counts.images,
    "default": artifact.DEFAULT_PROBABILITY,
    "bank": calibration.bank is not None,
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


def _row(searcher, id):
  row = searcher.collection.row(id)
  if row is None:
    raise UnknownImage(id)
  return row


def _result(searcher, row):
  id = searcher.collection.id(row)
  return {"id": id, "image": searcher.collection.name(row), "url": f"/image/{id}"}


def _thumbnail(collection, row, side):
  try:
    return thumbnails.make(collection.picture(row), side)
  except Exception as e:  # file or data set missing, or a damaged image
    print(f"no thumbnail of {collection.name(row)!a}: {e}", file=sys.stderr, flush=True)
    return None


def _examples(captions):
  """Up to six example queries: captions spread over the collection."""
  at = np.unique(np.linspace(0, len(captions) - 1, 60).astype(int)) if len(captions) else []
  texts = [text for text in (captions[int(i)] for i in at) if 8 <= len(text) <= 60]
  return texts[:: max(len(texts) // 6, 1)][:6]


def _round(score):
  return round(float(score), 4)
