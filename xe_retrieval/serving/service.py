"""The service behind the API: answers queries and reloads the index when it changes on disk."""

import asyncio
import collections
import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import sys

import cachetools
import numpy as np

from xe_retrieval.calibration import artifact
from xe_retrieval.preparation import cores
from xe_retrieval.search import searcher as searchers
from xe_retrieval.search import second_stage
from xe_retrieval.search.collection import MANIFEST
from xe_retrieval.serving import responses, thumbnails
from xe_retrieval.serving.batching import Batcher, Busy
from xe_retrieval.serving.limits import LIMITS, return_memory
from xe_retrieval.serving.loaded import InvalidRequest, Loaded, UnknownImage, embed_pictures

POLL = 1.0  # seconds between checks for a new index
_PICTURE_CACHE = 1_024  # embedded pictures
_THUMBNAIL_CACHE = 64 << 20  # bytes
_LOOKUPS = 8  # threads that ask the store, which may be far away, for few images


class Service:
  """Returns dicts in the shape of schema.py; raises InvalidRequest, UnknownImage or Busy."""

  def __init__(self, path, workdir="", poll=POLL, model=None, rerank="", candidates=128):
    self.path, self.workdir, self._poll = pathlib.Path(path).expanduser(), workdir, poll
    self._rerank = rerank, candidates  # workdir of a re-ranker; "": none
    before = _stamp(self.path / MANIFEST)
    self._counted = collections.Counter(reloads=0, query_hits=0, query_misses=0)
    self._current = self._loaded(searchers.open_index(path, workdir, model))
    # The stamp from before loading: a change during loading is picked up by the next poll.
    self._seen = [before, *self._signature()[1:]]
    self._thumbnails = cachetools.LRUCache(_THUMBNAIL_CACHE, lambda made: len(made[0]))
    self._uploads = cachetools.LRUCache(_PICTURE_CACHE)  # (model, id) -> vector
    self._queries = Batcher(self._answer, LIMITS["batch"], LIMITS["waiting"])
    self._pictures = Batcher(embed_pictures, 1, LIMITS["pictures"])
    self._decoding = 0  # thumbnails being made
    self._pool = concurrent.futures.ThreadPoolExecutor(cores.available() + 1)
    self._counting = 0  # curves that are waited for
    self._curves = concurrent.futures.ThreadPoolExecutor(1)
    self._lookups = concurrent.futures.ThreadPoolExecutor(_LOOKUPS)

  def _loaded(self, searcher):
    workdir, candidates = self._rerank
    second = second_stage.SecondStage(searcher, workdir, candidates) if workdir else None
    return Loaded(searcher, self._counted, second)

  @property
  def searcher(self) -> searchers.Searcher:
    return self._current.searcher

  def warm_up(self):
    self._current.warm_up()

  def sizes(self) -> dict[str, int]:
    """For /metrics."""
    return {
      "queue": self._queries.waiting,
      "pictures": self._pictures.waiting,
      "decoding": self._decoding,
      "cached_queries": len(self._current.queries),
      "cached_thumbnail_bytes": int(self._thumbnails.currsize),
      "images": len(self.searcher.collection),
      "generation": int(self.searcher.collection.manifest["generation"].lstrip("g")),
      **self._counted,
    }

  # ---- answering ----

  async def search(self, queries, options: dict, like: str | None = None):
    """`options` are fields of schema.Search; `queries` may be empty if there is a picture."""
    found = await self._found(queries, options, like)

    def shown():
      return [
        responses.search(loaded.searcher, one, like) | {"version": loaded.version}
        for loaded, one in found
      ]

    return await self._look_up(shown)

  async def export(self, queries, options: dict, kind: str, like: str | None = None):
    """(content, media type)."""
    ((loaded, found),) = await self._found(queries, options, like)
    return await asyncio.get_running_loop().run_in_executor(
      self._pool, responses.export, loaded.searcher, found, kind
    )

  async def _found(self, queries, options, like):
    if not queries and like is None:
      raise InvalidRequest("search for what? q is words, like a picture; give one or both")
    await self._look_up(self._current.check, options, bool(queries))
    vector = None if like is None else await self._like(like)
    jobs = [(query, options, like, vector) for query in queries or [None]]
    return await self._queries.ask(jobs)

  async def _look_up(self, ask, *about):
    """Not in the event loop: a store that does not answer would stop all other requests."""
    return await asyncio.get_running_loop().run_in_executor(self._lookups, ask, *about)

  async def _like(self, id):
    """(model's fingerprint, vector) of an image of the index, or of an uploaded picture."""
    searcher = self.searcher
    model = searcher.model.fingerprint()

    def look():
      found = searcher.collection.find(id)
      return None if found is None else searcher.collection.store.vectors(np.array([found]))

    if (vector := await self._look_up(look)) is not None:
      return model, searcher.model.scoring.plain(vector)[0]
    if (model, id) not in self._uploads:
      raise UnknownImage(id)
    return model, self._uploads[model, id]

  async def picture(self, data: bytes) -> str:
    """An image file -> an id for `like`. It is known until others have pushed it out."""
    searcher, id = self.searcher, hashlib.sha256(data).hexdigest()[:16]
    key = searcher.model.fingerprint(), id
    if key not in self._uploads:
      (vector,) = await self._pictures.ask([(searcher, data)])
      self._uploads[key] = vector
    return id

  async def similar(self, id, top):
    return (await self._queries.ask([lambda loaded: loaded.similar(id, top)]))[0]

  async def curve(self, query):
    """Counts all images."""
    return await self._slowly(query, lambda loaded, embedded: loaded.curve(embedded))

  async def rerank(self, query, options):
    """Reads the first candidates with the re-ranker."""
    if self._current.second is None:
      raise InvalidRequest("this server has no re-ranker: serve --rerank=… names one")
    return await self._slowly(query, lambda loaded, embedded: loaded.rerank(embedded, options))

  async def _slowly(self, query, answer):
    """answer(Loaded, asking.Query) in a thread of its own: searches go on."""
    if self._counting >= LIMITS["curves"]:
      raise Busy
    self._counting += 1
    try:
      ((loaded, embedded),) = await self._queries.ask([lambda loaded: loaded.query(query)])
      loop = asyncio.get_running_loop()
      return await loop.run_in_executor(self._curves, answer, loaded, embedded)
    finally:
      self._counting -= 1

  async def image(self, id):
    loaded = self._current
    return await self._look_up(
      lambda: responses.images(loaded.searcher, np.array([loaded.find(id)]))[0]
    )

  def about(self):
    return self._current.about | {"version": self._current.version}

  async def thumbnail(self, id, side):
    """Returns (bytes, media type), from the cache or decoded in the thread pool."""
    loaded = self._current
    collection = loaded.searcher.collection

    def look():
      found = loaded.find(id)
      return found, collection.stamp(found)

    found, stamp = await self._look_up(look)
    key = (id, side, stamp)
    if key in self._thumbnails:
      return self._thumbnails[key]
    if self._decoding >= LIMITS["waiting"]:
      raise Busy
    self._decoding += 1
    try:
      loop = asyncio.get_running_loop()
      made = await loop.run_in_executor(self._pool, _thumbnail, collection, found, side)
    finally:
      self._decoding -= 1
    if made is None:
      return thumbnails.PLACEHOLDER, "image/svg+xml"
    self._thumbnails[key] = made
    return made

  def _answer(self, jobs):
    """[(text or None, options, id or None, (model, vector) or None), or a function of Loaded] ->
    [(Loaded, Found), or what the function returns, or an exception]."""
    loaded = self._current
    found = iter(loaded.answer([job for job in jobs if not callable(job)]))
    return [_result(job, loaded) if callable(job) else next(found) for job in jobs]

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
        self._seen[1:] = self._signature()[1:]  # of the workdir of the new model

  def _reload(self):
    try:
      new = searchers.open_index(self.path, self.workdir, self.searcher.model)
      loaded = self._loaded(new)
      if new.model is not self.searcher.model:
        loaded.warm_up()  # compiled before it serves
    except Exception as e:  # whatever it is, the old index serves on, and the next one is awaited
      print(f"the new index was not loaded: {e}", file=sys.stderr, flush=True)
      return
    self._current = loaded
    self._counted["reloads"] += 1
    print(f"reloaded: {len(new.collection):,} images", file=sys.stderr, flush=True)
    return_memory()

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


def _result(job, loaded):
  try:
    return job(loaded)
  except Exception as e:  # of this job, and not of those that came with it
    return e


def _thumbnail(collection, id, side):
  try:
    return thumbnails.make(collection.picture(id), side)
  except Exception as e:  # file or data set missing, or a damaged image
    print(
      f"no thumbnail of {collection.describe([id])[0]['image']!a}: {e}", file=sys.stderr, flush=True
    )
    return None
