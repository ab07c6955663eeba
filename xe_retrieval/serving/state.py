"""What the server knows: the current index, replaced while it serves, and what it made of it."""

import asyncio
import collections
import concurrent.futures
import contextlib
import os
import pathlib
import sys

import numpy as np

from xe_retrieval.retrieval import cutoff
from xe_retrieval.retrieval import searcher as searchers
from xe_retrieval.retrieval.collection import MANIFEST
from xe_retrieval.serving import thumbnails
from xe_retrieval.serving.batching import Batcher, Busy

LIMITS = {
  "query": 500,  # characters
  "batch": 64,  # queries of one request
  "top": 200,
  "waiting": 256,  # queries, or pictures
  "address": 8_192,  # bytes
  "body": 262_144,
}
POLL = 1.0  # seconds between looks at the index
_VECTORS = 4_096  # queries that are remembered
_PICTURES = 64 << 20  # bytes of pictures that are remembered


class Wrong(Exception):
  """The request asks for what cannot be; says why."""


class Unknown(Exception):
  """No image has this id."""


class State:
  """Answers in the shapes of schema.py; Wrong, Unknown or Busy where there is none."""

  def __init__(self, path, workdir="", poll=POLL, model=None):
    self.path, self.workdir, self._poll = pathlib.Path(path).expanduser(), workdir, poll
    before = _stamp(self.path / MANIFEST)
    # The searcher, and the vectors of queries that it was asked before: replaced together.
    self._current = searchers.open_index(path, workdir, model), collections.OrderedDict()
    self._seen = [before, *self._signature()[1:]]  # what comes while it is opened is seen later
    self._pictures, self._size = collections.OrderedDict(), 0
    self._queries = Batcher(self._answer, LIMITS["batch"], LIMITS["waiting"])
    self._drawing = 0
    self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() + 1)

  @property
  def searcher(self) -> searchers.Searcher:
    return self._current[0]

  def warm_up(self):
    """Compiles the text tower for every size of batch."""
    count = 1
    while count <= LIMITS["batch"]:
      self.searcher.nearest(self.searcher.embed(["a"] * count), 20)
      count *= 2

  # ---- answers ----

  async def search(self, queries, min_precision, threshold, top, near):
    _threshold(self.searcher, min_precision, threshold)  # before work: it may be wrong
    k = min(top + near, LIMITS["top"] * 2)
    answers = await self._queries.ask([(query, k) for query in queries])
    return [
      self._found(query, *answer, min_precision, threshold, top, near)
      for query, answer in zip(queries, answers, strict=True)
    ]

  async def similar(self, id, top):
    searcher = self.searcher
    row = _row(searcher, id)
    vector = np.asarray(searcher.collection.vectors[row])[None]
    answers = await self._queries.ask([(vector, top + 1), (vector, -top)])
    (newer, rows, scores), (newest, captions, caption_scores) = answers  # than `searcher`, perhaps
    others = [_result(newer, r) | {"score": _round(s)} for r, s in zip(rows, scores, strict=True)]
    texts = [newest.collection.captions[i] for i in captions]
    precision = newest.precision(caption_scores)
    return {
      "image": _result(searcher, row),
      "images": [other for other in others if other["id"] != id][:top],
      "captions": [
        {"caption": text, "score": _round(score), "precision": p}
        for text, score, p in zip(texts, caption_scores, precision, strict=True)
      ],
    }

  def image(self, id):
    return _result(self.searcher, _row(self.searcher, id))

  def about(self):
    collection, cutoffs = self.searcher.collection, self.searcher.cutoffs
    return {
      "images": len(collection),
      "captions": len(collection.captions),
      "generation": collection.manifest["generation"],
      "step": collection.manifest["step"],
      "thresholds": cutoffs
      and {
        "measured_on": cutoffs.measured_on(),
        "relevance": cutoff.WHAT[cutoffs.relevance],
        "default": cutoffs.default,
        **{
          name: getattr(cutoffs, name).tolist()
          for name in ("threshold", "precision", "recall", "returned")
        },
      },
      "examples": _examples(collection.captions),
      "limits": LIMITS,
    }

  async def picture(self, id, side):
    """(bytes, media type); decoded by few threads, and remembered."""
    searcher = self.searcher
    row = _row(searcher, id)
    key = (id, side, tuple(searcher.collection.stamps[row].tolist()))
    if key in self._pictures:
      self._pictures.move_to_end(key)
      return self._pictures[key]
    if self._drawing >= LIMITS["waiting"]:
      raise Busy
    self._drawing += 1
    try:
      loop = asyncio.get_running_loop()
      made = await loop.run_in_executor(self._pool, _picture, searcher.collection, row, side)
    finally:
      self._drawing -= 1
    if made is None:
      return thumbnails.PLACEHOLDER, "image/svg+xml"
    if key not in self._pictures:
      self._pictures[key] = made
      self._size += len(made[0])
    while self._size > _PICTURES:
      _, (content, _) = self._pictures.popitem(last=False)
      self._size -= len(content)
    return made

  def _found(self, query, searcher, rows, scores, min_precision, threshold, top, near):
    cut = _threshold(searcher, min_precision, threshold)
    found = searchers.Found(query, cut, float(scores[0]), rows, scores)
    hits = [
      _result(searcher, row) | {"score": _round(score), "precision": p}
      for row, score, p in zip(rows, scores, searcher.precision(scores), strict=True)
    ]
    return {
      "query": query,
      "threshold": _round(found.threshold),
      "relevant": found.above > 0,
      "best_score": _round(found.best),
      "results": hits[: min(found.above, top)],
      "near_misses": hits[found.above : found.above + near],
    }

  def _answer(self, jobs):
    """[(query or vector, k)] -> [(searcher, rows, scores)]; k < 0 asks for captions.

    The searcher goes along: its rows mean nothing to the next one.
    """
    searcher, known = self._current
    new = list({query for query, _ in jobs if isinstance(query, str)}.difference(known))
    if new:
      known.update(zip(new, searcher.embed(new), strict=True))
    vectors = [known[q][None] if isinstance(q, str) else q for q, _ in jobs]
    while len(known) > _VECTORS:
      known.popitem(last=False)
    answers = [None] * len(jobs)
    for captions in (False, True):
      at = [i for i, (_, k) in enumerate(jobs) if (k < 0) == captions]
      if at:
        search = searcher.collection.search_captions if captions else searcher.nearest
        most = max(abs(jobs[i][1]) for i in at)
        rows, scores = search(np.concatenate([vectors[i] for i in at]), most)
        for n, i in enumerate(at):
          k = abs(jobs[i][1])
          answers[i] = searcher, rows[n, :k].tolist(), scores[n, :k]
    return answers

  # ---- the index is replaced while serving ----

  @contextlib.asynccontextmanager
  async def watching(self):
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
      print(f"the new index is not taken over: {e}", file=sys.stderr, flush=True)
      return
    self._current = new, collections.OrderedDict()
    print(f"reloaded: {len(new.collection):,} images", file=sys.stderr, flush=True)

  def _signature(self):
    """Changes with the index and with the thresholds of its model."""
    where = self.workdir or self.searcher.collection.manifest["workdir"]
    return [_stamp(self.path / MANIFEST), _stamp(pathlib.Path(where) / cutoff.NAME)]


def _stamp(path):
  try:
    about = os.stat(path)
  except OSError:
    return None
  return about.st_mtime_ns, about.st_ino


def _threshold(searcher, min_precision, threshold):
  try:
    return searcher.threshold(min_precision, threshold)
  except ValueError as e:
    raise Wrong(str(e)) from e


def _row(searcher, id):
  row = searcher.collection.row(id)
  if row is None:
    raise Unknown(id)
  return row


def _result(searcher, row):
  id = searcher.collection.id(row)
  return {"id": id, "image": searcher.collection.name(row), "url": f"/image/{id}"}


def _picture(collection, row, side):
  try:
    return thumbnails.make(collection.picture(row), side)
  except Exception as e:  # gone, broken, or a data set that is no longer there
    print(f"no picture of {collection.name(row)!a}: {e}", file=sys.stderr, flush=True)
    return None


def _examples(captions):
  """Some captions to begin with, spread over the collection."""
  at = np.unique(np.linspace(0, len(captions) - 1, 60).astype(int)) if len(captions) else []
  texts = [text for text in (captions[int(i)] for i in at) if 8 <= len(text) <= 60]
  return texts[:: max(len(texts) // 6, 1)][:6]


def _round(score):
  return round(float(score), 4)
