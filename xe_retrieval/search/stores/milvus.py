"""The store that lies in Milvus: a file by milvus-lite in this process, or a server or cluster.

A row per image; its key is the id with the same bits, signed. Rows carry the number of the update
that added them, and readers ask for those up to the update that the manifest names: what an
interrupted update has added is not seen, and the next update takes it out. What the manifest says:

  {"kind": "milvus", "uri": "vectors.db", "name": "photos", "collection": "photos", "update": 3,
    "images": 118287, "width": 128, "index": "auto", "built": "FLAT", "owner": "…",
    "fields": {"stars": "c_stars"}}

Columns of tables that are known when the collection is made are typed fields; those that come later
are dynamic ones, because milvus-lite cannot add fields.
"""

import functools
import threading

import cachetools
import numpy as np

from xe_retrieval.search import conditions
from xe_retrieval.search.stores import milvus_client, milvus_rows
from xe_retrieval.search.stores.store import NAMED, OWN, Store, Unavailable

EXACT_BELOW = 250_000  # images; from there on, a server gets an approximate index
PAGE = 16_384  # results of one request, by Milvus's limit
LITE_PAGE = 4_096  # milvus-lite reads five whole rows for each result of a range search
MOST = 1_000_000  # scores that are listed by several requests
FIRST = 256  # results of the first request of a range search, most of which find less
ROWS = 16_384  # of which is kept what is known of them
RESULTS = 200_000  # of all queries of a request
EXACT_AT_ONCE = 16  # queries of a request for which an approximate index looks at nearly everything


class MilvusStore(Store):
  def __init__(self, path, about: dict, columns: dict[str, str], writing=False):
    self.columns, self._about, self.width = NAMED | columns, about, about["width"]
    self.lite = milvus_client.is_file(about["uri"])
    if "precision" in about:
      raise ValueError("--precision is for vectors in files; Milvus keeps float32")
    if self.lite and about["index"] == "scann":
      raise ValueError("milvus-lite has no ScaNN: leave --kind out, or use a Milvus server")
    self.client = milvus_client.connect(path, about["uri"])
    self.rows = milvus_rows.Rows(self.columns, about["fields"], self.client.version)
    self._about = about | {"built": milvus_client.check(self.client, about)}
    self._call = milvus_client.Calls(self.client, about, writing)
    self.matching = functools.lru_cache(64)(self._matching)
    self._lock = threading.Lock()
    self._gone = np.zeros(0, np.uint64)  # removed, ascending
    self._back = np.zeros(0, bool)  # which of these were added again
    self._cache = None if writing else cachetools.LRUCache(ROWS)  # key -> what is known of it
    if writing:
      self._delete(self._ids(f"batch > {about['update']}"))
      # As an interrupted `commit` leaves it.
      self.stale = self._about != about or self._count() != len(self)

  @property
  def approximate(self):
    return self._about["built"] != "FLAT"

  def __len__(self):
    return self._about["images"]

  # ---- reading ----

  def nearest(self, queries, k, where=None, exact=False):
    k, found = min(k, PAGE, len(self)), []
    size = EXACT_AT_ONCE if exact and self.approximate else RESULTS // max(k, 1)
    for some in _batches(queries, max(1, size)):
      found += self._search(some, k, where, exact=exact) if k else [([], [])] * len(some)
    most = max((len(ids) for ids, _ in found), default=0)  # all alike, unless approximate
    ids = np.zeros((len(found), most), np.int64)
    scores = np.full((len(found), most), -np.inf, np.float32)
    for q, (some, of) in enumerate(found):
      ids[q, : len(some)], scores[q, : len(of)] = some, of
    order = np.lexsort((ids, -scores), axis=1)
    ids, scores = (np.take_along_axis(x, order, axis=1) for x in (ids, scores))
    return ids.view(np.uint64), scores

  def above(self, queries, least, where=None):
    """By range search; from an approximate index, what that finds."""
    return [
      self._range(query, float(low), where) for query, low in zip(queries, least, strict=True)
    ]

  def scan(self, queries, k, least, where=None, exact=False, listed=False):
    ids, scores = self.nearest(queries, max(k, min(FIRST, len(self))), where, exact)
    found = None
    if exact or not self.approximate:
      found = []
      for query, low, of in zip(queries, least, scores, strict=True):
        found.append(self._passing(query, float(low), of, where, listed))
    return ids[:, :k], scores[:, :k], found

  def _passing(self, query, least, best, where, listed):
    """Scores from `least` on, of which the `best` are known. Unless `listed`, only how many they
    are is right, which takes one question if all images pass, and one page of scores if not."""
    if len(best) < FIRST or best[-1] < least:
      return best[np.isfinite(best) & (best >= least)]
    if listed:
      return self._range(query, least, where)
    [(_, lowest)] = self._search([-query], 1, where, exact=True)
    if -lowest[0] < least:
      return self._range(query, least, where, PAGE)
    count = self.matching(where)
    rest = np.full(max(count - len(best), 0), best[-1], np.float32)
    return np.append(best, rest) if count <= MOST else None

  def histogram(self, queries, grid):
    if self.approximate or len(self) > (LITE_PAGE if self.lite else PAGE):
      return None
    _, scores = self.nearest(queries, len(self))
    return np.stack([(of >= np.asarray(grid)[:, None]).sum(axis=1) for of in scores])

  def _matching(self, where):
    return len(self) if where is None else self._count(self._filter(where))

  def any_matches(self, where):
    return len(self._ask("query", filter=self._filter(where), limit=1, output_fields=["id"])) > 0

  def has(self, ids):
    found, done = self._rows_of(ids, OWN), self._about["update"]
    return np.array([i in found and found[i]["batch"] <= done for i in _signed(ids)], bool)

  def fetch(self, ids, columns):
    found = self._rows_of(ids, columns)
    rows = [self._row(found, i) for i in _signed(ids)]
    return {name: [self.rows.value(row, name) for row in rows] for name in columns}

  def _rows_of(self, ids, columns):
    """{key: row} of those that are there; a page asks several times for the same images."""
    wanted = dict.fromkeys(_signed(ids))
    if self._cache is None or not OWN.keys() >= set(columns):
      return {row["id"]: row for row in self._query(list(wanted), self.rows.fields(columns))}
    with self._lock:
      found = {key: self._cache[key] for key in wanted if key in self._cache}
    new = self._query([key for key in wanted if key not in found], self.rows.fields(OWN))
    found |= {row["id"]: row for row in new}
    with self._lock:
      self._cache.update({row["id"]: row for row in new})
    return found

  def vectors(self, ids):
    found = {row["id"]: row["vector"] for row in self._query(_signed(ids), ["vector"])}
    rows = [self._row(found, i) for i in _signed(ids)]
    return np.array(rows, np.float32).reshape(-1, self.width)

  def _row(self, found, key):
    if key not in found:
      name = self._about["name"]
      raise Unavailable(f"{name} is being updated, images of this answer have gone: ask again")
    return found[key]

  def _filter(self, where):
    done = conditions.Test("batch", "<=", self._about["update"])
    return conditions.all_of(done, where).milvus(self.rows.written)

  def _search(self, queries, k, where, exact=False, **range_):
    """[(ids, scores)] of each query."""
    params = range_ | milvus_client.effort(self._about["built"], k, exact)
    found = self._ask(
      "search",
      data=list(np.ascontiguousarray(queries, np.float32)),
      anns_field="vector",
      filter=self._filter(where),
      limit=k,
      output_fields=["id"],
      search_params={"metric_type": "IP", "params": params},
    )
    return [([hit["id"] for hit in hits], [hit["distance"] for hit in hits]) for hits in found]

  def _range(self, query, least, where, most=MOST):
    """Scores from `least` on, page by page from the highest; None: too many."""
    if not np.isfinite(least) and least > 0 or not len(self):
      return np.zeros(0, np.float32)
    radius = float(np.nextafter(np.float32(max(least, -1e30)), np.float32(-np.inf)))  # exclusive
    page, ceiling, found = LITE_PAGE if self.lite else PAGE, {}, {}
    limit = min(FIRST, len(self))
    while True:
      [(ids, scores)] = self._search([query], limit, where, radius=radius, **ceiling)
      before = len(found)
      found |= dict(zip(ids, scores, strict=True))
      if len(ids) < limit or len(found) == len(self):
        known = np.fromiter(found.values(), np.float32, len(found))
        return known[known >= least]
      if limit < min(page, len(self)):
        limit = min(8 * limit, page, len(self))
      elif self.lite or len(found) == before or len(found) >= most:
        return None  # milvus-lite cuts to a limit before it looks at a ceiling
      else:
        ceiling = {"range_filter": min(scores)}

  def _query(self, keys, fields):
    out = []
    for some in _batches(keys, 1000):
      out += self._ask("query", ids=some, output_fields=["id", "batch", *fields])
    return out

  def _count(self, filter=""):
    return self._ask("query", filter=filter, output_fields=["count(*)"])[0]["count(*)"]

  def _pages(self, filter, fields):
    fields = ["id", *fields]
    pages = self._ask("query_iterator", batch_size=PAGE, filter=filter, output_fields=fields)
    with milvus_client.asking(self._about["uri"]):
      while page := pages.next():
        yield page
      pages.close()

  def _ids(self, filter):
    found = [row["id"] for page in self._pages(filter, []) for row in page]
    return np.array(found, np.int64).view(np.uint64)

  def _ask(self, method, **more):
    """Of the client; Milvus answers with all that was written before."""
    return self._call(method, consistency_level="Strong", **more)

  # ---- writing ----

  def known(self, source):
    fields, rows = ["stamp_size", "stamp_time"], [np.zeros((0, 3), np.int64)]
    mine = conditions.Test("source", "==", source).milvus()
    for page in self._pages(mine, fields):
      rows.append(np.array([[row["id"], *(row[f] for f in fields)] for row in page], np.int64))
    rows = np.concatenate(rows)
    ids = rows[:, 0].copy().view(np.uint64)
    order = np.argsort(ids)
    return ids[order], rows[order, 1:]

  def add(self, ids, vectors, columns):
    """Readers see images that replace others at once, and new ones with the manifest."""
    ids, vectors = np.asarray(ids, np.uint64), np.asarray(vectors, np.float32)
    if vectors.shape[1] != self.width:
      raise ValueError(
        f"{self._about['name']} holds vectors of {self.width} dimensions, not {vectors.shape[1]}"
      )
    at = np.searchsorted(self._gone, ids)
    replaced = np.append(self._gone, 0)[at] == ids
    replaced &= at < len(self._gone)
    batch = np.where(replaced, 0, self._about["update"] + 1)
    size = max(1, min(2000, 8_000_000 // (4 * self.width + 1000)))
    for start in range(0, len(ids), size):
      some = slice(start, start + size)
      part = {name: column[some] for name, column in columns.items()}
      rows = self.rows.make(_signed(ids[some]), vectors[some], batch[some], part)
      self._call("upsert", data=rows)
    self._back[at[replaced]] = True

  def remove(self, ids):
    self._gone = np.union1d(self._gone[~self._back], np.asarray(ids, np.uint64))
    self._back = np.zeros(len(self._gone), bool)

  def _delete(self, ids):
    for some in _batches(_signed(ids), 2000):
      self._call("delete", ids=some)

  def commit(self, queries=None):
    self._delete(self._gone[~self._back])
    self._gone, self._back = self._gone[:0], self._back[:0]
    self._call("flush")
    images = self._count()
    built = self._wanted(images)
    if built != self._about["built"]:
      milvus_client.build(self.client, self._about["collection"], built)
    if self.lite:
      milvus_client.sync(self.client.file)
    about = {"images": images, "update": self._about["update"] + 1, "built": built}
    self._about = self._about | about
    self.matching.cache_clear()
    return self._about

  def _wanted(self, images):
    """The kind of index. milvus-lite goes through all rows in Python whatever it is."""
    kind = self._about["index"]
    if kind in ("exact", "auto"):
      large = kind == "auto" and not self.lite and images >= EXACT_BELOW
      return "HNSW" if large else "FLAT"
    return kind.upper()

  def swept(self, before):
    here = before.get("uri") == self._about["uri"]
    if here and before["collection"] != self._about["collection"]:
      milvus_client.drop(self.client, before)


def _signed(ids):
  return np.ascontiguousarray(ids, np.uint64).view(np.int64).tolist()


def _batches(items, size):
  return (items[i : i + size] for i in range(0, len(items), size))


def create(path, about: dict, columns: dict[str, str], width: int) -> MilvusStore:
  """An empty one to write to; what `stores.parse` returned, and `index`: auto, exact or scann."""
  client = milvus_client.connect(path, about["uri"])
  fields, written = milvus_rows.fields(columns, client.version)
  about = milvus_client.create(client, path, about | {"width": width}, fields)
  return MilvusStore(path, about | {"fields": written}, columns, writing=True)
