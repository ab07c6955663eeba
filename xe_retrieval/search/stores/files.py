"""The store that lies in the collection itself: segments on disk, exact or by ScaNN.

An update adds a segment with only the new rows, and a file of the rows that are gone. Segments are
merged when many are small, or when a third of their rows is gone; ScaNN of the others stays as it
is. What the manifest says:

  {"kind": "files", "width": 128, "precision": "float32", "index": "auto", "segments":
    [{"name": "s000001", "rows": 2000000, "ann": true, "removed": "removed-000001"}, …]}
"""

import functools
import shutil
import sys

import numpy as np
import pyarrow as pa

from xe_retrieval.search.stores import nearest, segments
from xe_retrieval.search.stores.store import NAMED, OWN, Store

EXACT_BELOW = 250_000  # rows; a query takes about 5 ms per 100,000 of them exactly
LARGEST = 2_000_000  # rows of a segment: ScaNN is built for one at a time, in memory
MOST_SMALL = 8  # segments below EXACT_BELOW
_LEAST_SCANN = 16  # rows: below, its hashes cannot be trained
_WORTH_SCANN = 50_000  # rows that are added to a collection with --kind=scann


class FileStore(Store):
  def __init__(self, path, about: dict, columns: dict[str, str], writing=False):
    self.path, self.columns = path, NAMED | columns
    self._about = {"precision": "float32", "index": "auto"} | about
    self.width = self._about["width"]
    self._set([segments.Segment(path, one, self.columns) for one in about["segments"]])
    self._writer, self._new = None, []
    self._masks = functools.lru_cache(16)(self._masks_of)
    self._any = functools.lru_cache(1024)(self._any_of)
    if not writing:
      self._masks(None)
      for segment in self.segments:  # so that the first query does not wait for it
        segment.index  # noqa: B018

  def _set(self, found):
    self.segments = found
    self._starts = np.cumsum([0, *map(len, found)])  # of their rows in the numbers used here

  @property
  def approximate(self):
    return any(segment.about["ann"] for segment in self.segments)

  def __len__(self):
    return self.matching(None)

  # ---- reading ----

  def _masks_of(self, where):
    """[(bool [n] or None, how many match)] of each segment."""
    masks = [segment.mask(where) for segment in self.segments]
    return [
      (mask, len(segment) if mask is None else int(np.count_nonzero(mask)))
      for mask, segment in zip(masks, self.segments, strict=True)
    ]

  def _searched(self, where):
    """(first row, segment, mask, count) of the segments in which something matches."""
    found = zip(self._starts[:-1], self.segments, self._masks(where), strict=True)
    return [(start, s, mask, count) for start, s, (mask, count) in found if count]

  def nearest(self, queries, k, where=None, exact=False):
    return self.scan(queries, k, None, where, exact)[:2]

  def scan(self, queries, k, least, where=None, exact=False, listed=False):
    queries = np.ascontiguousarray(queries, np.float32)
    k, found, passing = min(k, self.matching(where)), [], [[] for _ in queries]
    approximate = self.approximate and where is None and not exact and k <= segments.DEPTH
    if approximate:
      least = None
    for start, segment, mask, count in self._searched(where):
      one = None
      if approximate and segment.about["ann"]:
        one = segment.approximate(queries, min(k, count))
      rows, scores, above = (
        one and (*one, None) or nearest.scan(segment.vectors, queries, min(k, count), least, mask)
      )
      found.append((rows + start, scores))
      for of, more in zip(passing, above or [], strict=False):
        of.append(more)
    if not found:
      none = np.zeros((len(queries), 0), np.float32)
      return none.astype(np.uint64), none, None if least is None else list(none)
    rows, scores = (np.hstack(parts) for parts in zip(*found, strict=True))
    if len(found) > 1:
      order = np.lexsort((rows, -scores), axis=1)[:, :k]
      rows, scores = (np.take_along_axis(x, order, axis=1) for x in (rows, scores))
    return self._ids(rows), scores, None if least is None else [np.hstack(p) for p in passing]

  def above(self, queries, least, where=None):
    found = [[np.zeros(0, np.float32)] for _ in queries]
    for scores in self._tiles(queries, where):
      for one, of, low in zip(found, scores, least, strict=True):
        one.append(of[of >= low])
    return [np.concatenate(one) for one in found]

  def count(self, queries, least, where=None):
    found, least = np.zeros(len(queries), np.int64), np.asarray(least)[:, None]
    for scores in self._tiles(queries, where):
      found += np.count_nonzero(scores >= least, axis=1)
    return found.tolist()

  def histogram(self, queries, grid):
    found = np.zeros((len(queries), len(grid)), np.int64)
    for scores in self._tiles(queries, None):
      scores.sort(axis=1)
      for one, line in zip(scores, found, strict=True):
        line += len(one) - np.searchsorted(one, grid)
    return found

  def _tiles(self, queries, where):
    queries = np.ascontiguousarray(queries, np.float32)
    for _, segment, mask, _ in self._searched(where):
      for _, scores in nearest.tiles(segment.vectors, queries, mask):
        yield scores

  def matching(self, where):
    return sum(count for _, count in self._masks(where))

  def any_matches(self, where):
    return self._any(where)

  def _any_of(self, where):
    """No mask is kept: those that are would give way to folders, of which there are many."""
    masks = (segment.mask(where) for segment in self.segments)
    return any(mask is None or mask.any() for mask in masks)

  def _changed(self):
    self._masks.cache_clear()
    self._any.cache_clear()

  def has(self, ids):
    return self._rows(ids) >= 0

  def fetch(self, ids, columns):
    rows = self._rows(ids)
    parts, places = {name: [] for name in columns}, [np.zeros(0, np.int64)]
    for start, segment, at in self._split(rows):
      some = segment.table.select(list(columns)).take(pa.array(rows[at] - start))
      places.append(at)
      for name in columns:
        parts[name].append(some[name].cast(OWN.get(name) or some[name].type))
    back = pa.array(np.argsort(np.concatenate(places)))
    return {n: _values(pa.chunked_array(p).take(back)) if p else [] for n, p in parts.items()}

  def vectors(self, ids):
    rows = self._rows(ids)
    out = np.empty((len(rows), self.width), np.float32)
    for start, segment, at in self._split(rows):
      out[at] = segment.vectors[rows[at] - start]
    return out

  def _rows(self, ids):
    """uint64 [n] -> int64 [n]; −1 for what is not there."""
    ids = np.asarray(ids, np.uint64)
    rows = np.full(len(ids), -1)
    for start, segment in zip(self._starts[:-1], self.segments, strict=True):
      found = segment.find(ids)
      rows = np.where(found >= 0, found + start, rows)
    return rows

  def _split(self, rows):
    """(first row, segment, int64 [m]: which of the rows it has)."""
    for start, segment in zip(self._starts[:-1], self.segments, strict=True):
      at = np.flatnonzero((rows >= start) & (rows < start + len(segment)))
      if len(at):
        yield start, segment, at

  def _ids(self, rows):
    flat = rows.reshape(-1)
    out = np.empty(len(flat), np.uint64)
    for start, segment, at in self._split(flat):
      out[at] = segment.ids[flat[at] - start]
    return out.reshape(rows.shape)

  # ---- writing ----

  def known(self, source):
    ids, stamps = [np.zeros(0, np.uint64)], [np.zeros((0, 2), np.int64)]
    for segment in self.segments:
      sources = segment.table["source"].combine_chunks()
      values = sources.dictionary.to_pylist()
      if source not in values:
        continue
      mine = sources.indices.to_numpy(zero_copy_only=False) == values.index(source)
      rows = np.flatnonzero(mine if segment.alive is None else mine & segment.alive)
      ids.append(segment.ids[rows])
      some = [segment.table[f"stamp_{x}"].to_numpy()[rows] for x in ("size", "time")]
      stamps.append(np.stack(some, axis=1))
    ids, stamps = np.concatenate(ids), np.concatenate(stamps)
    order = np.argsort(ids)
    return ids[order], stamps[order]

  def add(self, ids, vectors, columns):
    while len(ids):
      self._writer = self._writer or self._open_writer()
      room = LARGEST - self._writer.rows
      some = {name: column[:room] for name, column in columns.items()}
      self._writer.add(ids[:room], vectors[:room], some)
      ids, vectors = ids[room:], vectors[room:]
      columns = {name: column[room:] for name, column in columns.items()}
      if self._writer.rows == LARGEST:
        self._finish()

  def _open_writer(self):
    return segments.Writer(self.path, self.width, self._about["precision"])

  def _finish(self):
    if self._writer and self._writer.rows:
      self._new.append(segments.Segment(self.path, self._writer.close(), self.columns))
    self._writer = None

  def remove(self, ids):
    rows = self._rows(ids)
    for start, segment, at in self._split(rows):
      segment.remove(rows[at] - start)
    self._changed()

  def commit(self, queries=None):
    self._finish()
    kept = [segment for segment in (*self.segments, *self._new) if segment.count]
    self._new = []
    if again := self._to_merge(kept):
      for segment in again:
        for part in segments.parts(segment):
          self.add(*part)
      self._finish()
      kept = [segment for segment in kept if segment not in again] + self._new
      self._new = []
    self._build(kept, queries)
    for segment in kept:
      segment.write_removed()
    self._set(kept)
    self._changed()
    return self._about | {"segments": [segment.about for segment in kept]}

  def _worth(self, kept):
    """Rows from which on a segment gets ScaNN, and those without are merged to get it."""
    hashed = any(segment.about["ann"] for segment in kept)
    scann = _WORTH_SCANN if hashed else _LEAST_SCANN
    return {"exact": np.inf, "auto": EXACT_BELOW, "scann": scann}[self._about["index"]]

  def _to_merge(self, kept):
    """Segments that are written anew, together."""
    precision = np.dtype(self._about["precision"])
    again = {s for s in kept if s.vectors.dtype != precision or 3 * s.count < 2 * len(s)}
    plain = [s for s in kept if not s.about["ann"]]
    if len(plain) > 1 and sum(s.count for s in plain if len(s) < LARGEST) >= self._worth(kept):
      again |= {s for s in plain if len(s) < LARGEST}
    small = [s for s in kept if len(s) < EXACT_BELOW]
    if len(small) > MOST_SMALL:
      again |= set(small)
    return [s for s in kept if s in again]

  def _build(self, kept, queries):
    if self._about["index"] == "exact":
      for segment in kept:
        segment.about = segment.about | {"ann": False}
      return
    worth = self._worth(kept)
    for segment in kept:
      if len(segment) < worth or segment.about["ann"]:
        continue
      if (segment.path / "ann").exists():  # from when the collection was of another kind
        shutil.rmtree(segment.path / "ann")
      print(f"building an index of {len(segment):,} vectors", file=sys.stderr)
      segments.build_index(segment, queries and queries())

  def swept(self, before):
    held = [one for about in (before, self._about) for one in about.get("segments", ())]
    held += [segment.about for segment in self.segments]
    names = {one["name"] for one in held}
    for path in segments.numbered(self.path, "s", ("vectors.npy", "rows.arrow")):
      if path.name not in names:
        shutil.rmtree(path, ignore_errors=True)
    removed = {(one["name"], one.get("removed")) for one in held}
    for segment in self.segments:
      for path in segment.path.glob("removed-*.npy"):
        if (segment.about["name"], path.stem) not in removed:
          path.unlink(missing_ok=True)


def _values(column):
  """Of whole numbers an array: there may be as many as images."""
  whole = pa.types.is_integer(column.type) and not column.null_count
  return column.to_numpy() if whole else column.to_pylist()
