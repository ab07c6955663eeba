"""One generation of the index as the server holds it: its searcher, and what is cached for it."""

import collections
import functools
import hashlib
import json

import cachetools
import numpy as np

from xe_retrieval.search import asking
from xe_retrieval.search import searcher as searchers
from xe_retrieval.search.stores.store import Unavailable
from xe_retrieval.serving import responses, thumbnails
from xe_retrieval.serving.batching import Busy
from xe_retrieval.serving.limits import LIMITS
from xe_retrieval.towers import bank

_QUERY_CACHE = 4_096  # embedded queries
_WHERE = ("folder", "since", "until", "filter")
_PAGE = ("top", "offset", "near", "order", "levels", "weight")  # options that Ask has too


class InvalidRequest(Exception):
  """The request cannot be answered; the message says why."""


class UnknownImage(Exception):
  """No image has this id."""


class Loaded:
  """Replaced as a whole when the index is reloaded."""

  def __init__(self, searcher: searchers.Searcher, counted: collections.Counter, second=None):
    self.searcher, self._counted = searcher, counted
    self.second = second  # a second_stage.SecondStage, or None
    self.queries = cachetools.LRUCache(_QUERY_CACHE)  # text -> asking.Query
    self._curves = functools.cache(lambda: responses.other_curves(searcher))
    self.about = self._about()
    # Differs after a new evaluation too, which leaves the generation of the index as it is.
    self.version = hashlib.sha256(json.dumps(self.about).encode()).hexdigest()[:16]

  def warm_up(self):
    """Compiles the text tower for every batch size, and the image tower for one picture."""
    count = 1
    while count <= LIMITS["batch"]:
      queries = self.searcher.embed(["a"] * count)
      self.searcher.collection.search(np.stack([query.vector for query in queries]), 20)
      count *= 2
    self.searcher.picture(np.zeros((64, 64, 3), np.uint8))
    if self.second:
      self.second.warm_up()

  def _about(self) -> dict:
    collection, known = self.searcher.collection, self.searcher.calibration
    captions, audit = collection.captions, collection.manifest["audit"]
    if not len(captions) and known and known.bank:
      captions = known.bank.captions  # of the training data
    return {
      "images": len(collection),
      "captions": len(collection.captions),
      "generation": collection.manifest["generation"],
      "step": collection.manifest["step"],
      "scores": bank.in_words(self.searcher.model.scoring.correction),
      "calibration": known and responses.calibration(self.searcher),
      "examples": responses.examples(captions),
      **collection.manifest["summary"],  # folders and dates
      "columns": [{"column": c, "type": t} for c, t in collection.store.columns.items()],
      "rerank": self.second and self.second.candidates,
      "audit": audit and {name: audit[name] for name in ("recall_at_10", "queries", "asked")},
      "limits": LIMITS,
    }

  def find(self, id: str):
    """Hexadecimal -> uint64."""
    found = self.searcher.collection.find(id)
    if found is None:
      raise UnknownImage(id)
    return found

  def similar(self, id, top):
    return responses.similar(self.searcher, self.find(id), top)

  def query(self, text):
    return self, *self._embedded([text])

  def curve(self, query):
    return responses.curve(self.searcher, query, self._curves())

  def rerank(self, query, options):
    """What responses.reranked shows; InvalidRequest for a wrong filter."""
    try:
      where = self.searcher.collection.where(*(options[name] for name in _WHERE))
    except Unavailable:
      raise
    except ValueError as e:
      raise InvalidRequest(str(e)) from e
    return responses.reranked(self.searcher, query, *self.second.order([query], where)[0])

  def check(self, options, words: bool):
    """InvalidRequest if these options cannot be answered, before any work."""
    self._ask(asking.Query("", None, None, False, True, []) if words else None, options)

  def answer(self, jobs):
    """[(text or None, options, id or None, (model, vector) or None)] ->
    [(Loaded, Found), or an exception if the index has changed since the request was checked]."""
    queries = self._embedded([job[0] for job in jobs])
    asks = [self._prepared(query, *job[1:]) for query, job in zip(queries, jobs, strict=True)]
    valid = [ask for ask in asks if isinstance(ask, asking.Ask)]
    found = iter(self._found(valid))
    return [next(found) if isinstance(a, asking.Ask) else a for a in asks]

  def _found(self, asks):
    """[(self, Found) or an exception]: what one ask raises is no answer to the others."""
    try:
      return [(self, found) for found in asking.answer(self.searcher, asks)]
    except Unavailable:  # nor would it answer them one by one
      raise
    except Exception as e:
      if len(asks) == 1:
        return [e]
      return [self._found([ask])[0] for ask in asks]

  def _embedded(self, texts):
    """[str or None] -> [Query or None]."""
    wanted = {text for text in texts if text is not None}
    known = {text: self.queries[text] for text in wanted if text in self.queries}
    self._counted.update(query_hits=len(known), query_misses=len(wanted) - len(known))
    if new := list(wanted - known.keys()):
      known |= zip(new, self.searcher.embed(new), strict=True)
      self.queries.update(known)
    return [known.get(text) for text in texts]

  def _prepared(self, query, options, id, like):
    try:
      model, vector = like or (None, None)
      if model not in (None, self.searcher.model.fingerprint()):
        raise Busy  # another model has been loaded since
      without = None if id is None else self.searcher.collection.find(id)
      return self._ask(query, options, like=vector, without=without)
    except (InvalidRequest, Busy) as e:
      return e

  def _ask(self, query, options, **more):
    searcher = self.searcher
    asked = {name: options[name] for name in searchers.CUT}
    where = (options[name] for name in _WHERE)
    try:
      cut = searcher.cut(**asked, words=query.words) if query else searchers.picture_cut(**asked)
      where = searcher.collection.where(*where)
    except Unavailable:
      raise
    except ValueError as e:
      raise InvalidRequest(str(e)) from e
    page = {name: options[name] for name in _PAGE if name in options}
    if query is None and not searcher.collection.store.approximate:
      page["levels"] = False  # of a picture there are none, and the total is right without
    return asking.Ask(query, cut, where=where, **page, **more)


def embed_pictures(jobs):
  """[(Searcher, image file)] -> [float32 [width] or InvalidRequest]."""
  out = []
  for searcher, data in jobs:
    try:
      with thumbnails.checked(data):
        out.append(searcher.picture(data))
    except ValueError as e:
      out.append(InvalidRequest(f"the picture cannot be read: {e}"))
  return out
