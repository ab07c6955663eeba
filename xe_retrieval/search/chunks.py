"""Embedded images on their way into a collection: numbered Parquet files, opened one at a time.

Each file holds a few thousand images: `id` uint64, `name` binary, `vector` (a list of `width`
floats, as bank.Scoring.image gives them), `stamp_size` and `stamp_time` int64.
"""

import collections
import itertools
import os
import pathlib
import time
from typing import NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xe_retrieval.embed import embedding_loop
from xe_retrieval.search import filters, image_sources
from xe_retrieval.search.stores import segments

FOLDERS = 500  # that are listed


class Chunk(NamedTuple):
  ids: np.ndarray  # uint64 [n]
  names: list[bytes]
  vectors: np.ndarray  # float32 [n, width]
  stamps: np.ndarray  # int64 [n, 2]


def write(path, chunk: Chunk) -> None:
  """Whole or not at all, and on the disk when this returns."""
  path = pathlib.Path(path)
  flat = pa.array(np.ascontiguousarray(chunk.vectors, np.float32).reshape(-1))
  table = pa.table(
    {
      "id": pa.array(chunk.ids, pa.uint64()),
      "name": pa.array(chunk.names, pa.binary()),
      "vector": pa.FixedSizeListArray.from_arrays(flat, chunk.vectors.shape[1]),
      "stamp_size": pa.array(chunk.stamps[:, 0], pa.int64()),
      "stamp_time": pa.array(chunk.stamps[:, 1], pa.int64()),
    }
  )
  part = path.with_name(path.name + ".part")
  pq.write_table(table, part, compression="none", use_dictionary=False)
  segments.sync(part)
  part.replace(path)
  segments.sync(path.parent)


def read(path) -> Chunk:
  table = pq.read_table(path)
  ids, stamps = _marks(table)
  vectors = table["vector"].combine_chunks()
  width = vectors.type.list_size
  flat = vectors.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
  return Chunk(ids, table["name"].to_pylist(), flat.reshape(-1, width), stamps)


def _marks(table):
  stamps = [table[f"stamp_{x}"].to_numpy() for x in ("size", "time")]
  return table["id"].to_numpy(), np.stack(stamps, axis=1)


class Chunks:
  """The files of one source, with what of them is wanted: 33 bytes of memory per image."""

  def __init__(self, paths):
    self.paths, self.wanted = sorted(map(pathlib.Path, paths)), []  # wanted: bool [n] of each file
    found = [
      _marks(pq.read_table(p, columns=["id", "stamp_size", "stamp_time"])) for p in self.paths
    ]
    self.wanted = [np.zeros(len(ids), bool) for ids, _ in found]
    ids = np.concatenate([np.zeros(0, np.uint64), *(ids for ids, _ in found)])
    self._ids, last = np.unique(ids[::-1], return_index=True)  # what was written last is newest
    at = len(ids) - 1 - last
    stamps = np.concatenate([np.zeros((0, 2), np.int64), *(stamps for _, stamps in found)])
    self._stamps = stamps[at]
    starts = np.cumsum([0, *map(len, self.wanted)])
    self._file = np.searchsorted(starts, at, side="right") - 1
    self._row = at - starts[self._file]

  def take(self, ids, stamps) -> np.ndarray:
    """uint64 [n], int64 [n, 2] -> bool [n]: which are here as they are now; these are wanted."""
    at, there = lookup(self._ids, ids)
    there[there] = (self._stamps[at[there]] == stamps[there]).all(axis=1)
    for file, row in zip(self._file[at[there]], self._row[at[there]], strict=True):
      self.wanted[file][row] = True
    return there

  def add(self, directory, chunk: Chunk) -> None:
    """One more file, all of which is wanted."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{time.time_ns():020d}-{jax.process_index():04d}.parquet"
    write(path, chunk)
    self.paths.append(path)
    self.wanted.append(np.ones(len(chunk.ids), bool))

  def ids(self) -> np.ndarray:
    """Of all that is wanted."""
    read_ids = (pq.read_table(path, columns=["id"])["id"].to_numpy() for path in self.paths)
    some = [ids[wanted] for ids, wanted in zip(read_ids, self.wanted, strict=True)]
    return np.concatenate([np.zeros(0, np.uint64), *some])

  def __iter__(self):
    """What is wanted, file by file."""
    for path, wanted in zip(self.paths, self.wanted, strict=True):
      if wanted.any():
        chunk, rows = read(path), np.flatnonzero(wanted)
        names = [chunk.names[row] for row in rows]
        yield Chunk(chunk.ids[rows], names, chunk.vectors[rows], chunk.stamps[rows])


def lookup(ordered, ids):
  """Ascending [N], [n] -> int64 [n] where each is, bool [n] whether it is there."""
  if not len(ordered):
    return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
  at = np.minimum(np.searchsorted(ordered, ids), len(ordered) - 1)
  return at, ordered[at] == ids


def embed(model, source, entries) -> tuple[Chunk | None, list[tuple[str, str]]]:
  """Entries [n] -> those that are pictures, None if none is; (name, reason) of the others."""
  found = list(embedding_loop.chunks(embedding_loop.embed(model, source, entries), len(entries)))
  good, vectors, failed = found[0]
  failed = [(entry.name, reason) for entry, reason in failed]
  if not good:
    return None, failed
  names, stamps = [os.fsencode(e.name) for e in good], np.array([e.stamp for e in good], np.int64)
  return Chunk(image_sources.ids(source.key, names), names, vectors, stamps), failed


class Walk:
  """What is found in a source, beside what is known of it."""

  def __init__(self, source, known, found):
    self.source, self.known, self.chunks = source, known, found
    self.kept = np.zeros(len(known[0]), bool)
    self.ids, self.failed = [], []
    self._folders, self._dates = collections.Counter(), []

  def look(self, entries) -> list:
    """Those that are new or changed, and were not embedded by an interrupted run."""
    ids, stamps = ids_of(self.source, entries), np.array([e.stamp for e in entries], np.int64)
    self.ids.append(ids)
    at, same = lookup(self.known[0], ids)
    same[same] = (self.known[1][at[same]] == stamps[same]).all(axis=1)
    self.kept[at[same]] = True
    new = np.flatnonzero(~same)
    new = new[~self.chunks.take(ids[new], stamps[new])]
    self._folders.update(os.path.dirname(e.name) for e in entries)
    dated = stamps[:, 1][stamps[:, 1] >= 0]
    if len(dated) and not self.source.has_captions:
      self._dates = [min([*self._dates, *dated.tolist()]), max([*self._dates, *dated.tolist()])]
    return [entries[i] for i in new.tolist()]

  def fail(self, failed):
    self.failed += failed
    self._folders.subtract(os.path.dirname(name) for name, _ in failed)

  def summary(self, label) -> dict:
    """Folders with the number of images in and under each, and the first and last date."""
    totals = collections.Counter()
    for name, count in self._folders.items():
      path = folder(label, os.path.join(name, "_"))
      for end in itertools.accumulate(path.split("/"), lambda a, b: f"{a}/{b}"):
        totals[end] += count
    found = [{"folder": path, "images": count} for path, count in totals.items() if count]
    days = [filters.day(date) for date in self._dates]
    return {"folders": listed(found), "dates": days}


def listed(folders) -> list[dict]:
  """The FOLDERS that are least deep."""
  known = sorted(folders, key=lambda f: (f["folder"].count("/"), f["folder"]))[:FOLDERS]
  return sorted(known, key=lambda f: f["folder"])


def folder(label, name) -> str:
  """The folder of an image, with its source; what is not UTF-8 is replaced."""
  return image_sources.readable(os.path.join(label, os.path.dirname(name))).rstrip("/")


def columns(source, label, names, stamps) -> dict[str, pa.Array]:
  """What is known of every image (stores.store.OWN): list of bytes [n], int64 [n, 2]."""
  dates = np.full(len(names), -1) if source.has_captions else np.maximum(stamps[:, 1], -1)
  years = dates.astype("datetime64[ns]").astype("datetime64[Y]").astype(np.int64) + 1970
  return {
    "source": pa.array([label] * len(names), pa.string()),
    "folder": pa.array([folder(label, os.fsdecode(name)) for name in names], pa.string()),
    "name": pa.array(names, pa.binary()),
    "date": pa.array(dates, pa.int64()),
    "year": pa.array(np.where(dates < 0, -1, years), pa.int64()),
    "stamp_size": pa.array(stamps[:, 0], pa.int64()),
    "stamp_time": pa.array(stamps[:, 1], pa.int64()),
  }


def ids_of(source, entries):
  return image_sources.ids(source.key, [os.fsencode(entry.name) for entry in entries])


def batches(items, size):
  """Lists of at most `size`."""
  items = iter(items)
  return iter(lambda: list(itertools.islice(items, size)), [])
