"""Segments of a collection on disk: written once, then read through memory maps.

INDEX/s000007/
  vectors.npy           float32 or float16 [n, width], in the order of the rows
  rows.arrow            an Arrow IPC file of one batch: names and what else is known of each image
  ids.npy               uint64 [n]
  sorted.npy, order.npy the ids in ascending order, and the row of each
  ann/                  ScaNN's hashes, if there are many rows; no vectors, no pickle
  removed-000002.npy    rows that are gone; a new file for each change, named by the manifest
"""

import functools
import io
import os
import pathlib
import re

import numpy as np
import pyarrow as pa

from xe_retrieval.data.paths import sync
from xe_retrieval.search.stores import condition_tree, scann_index
from xe_retrieval.search.stores.store import OWN, TYPES

DEPTH = 1_000  # neighbours that ScaNN is asked for; more are found faster by comparing with all
_SHARED = ("source", "folder")  # columns of few values, stored once each
_TILE = 1 << 16


class Segment:
  """One segment without the rows that are gone."""

  def __init__(self, index, about: dict, columns: dict[str, str]):
    self.about, self.path = about, pathlib.Path(index) / about["name"]
    self.vectors, self.ids = self._load("vectors"), self._load("ids")
    # Not the ids with a sorter: NumPy would copy that for each search.
    self._sorted, self._order = self._load("sorted"), self._load("order")
    with pa.memory_map(str(self.path / "rows.arrow")) as file:
      table = pa.ipc.open_file(file).read_all()
    for name, kind in columns.items():
      if name not in table.column_names:  # a column that later segments have
        table = table.append_column(name, pa.nulls(len(table), TYPES[kind]))
    self.table = table
    self.alive, removed = None, about.get("removed")
    if removed:
      self._mark(self._load(removed))

  def _load(self, name):
    return np.load(self.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)

  def __len__(self):
    return len(self.ids)

  @property
  def count(self) -> int:
    """Images that are not gone."""
    return len(self) if self.alive is None else int(np.count_nonzero(self.alive))

  @functools.cached_property
  def index(self):
    return scann_index.load(self.path / "ann", self.vectors) if self.about["ann"] else None

  def find(self, ids) -> np.ndarray:
    """uint64 [n] -> int64 [n]: rows, −1 for what is not there."""
    place = np.minimum(np.searchsorted(self._sorted, ids), len(self) - 1)
    rows, there = self._order[place].astype(np.int64), self._sorted[place] == ids
    return np.where(there if self.alive is None else there & self.alive[rows], rows, -1)

  def remove(self, rows) -> None:
    """Takes rows out, in memory; `write_removed` makes it last."""
    if len(rows):
      self._mark(rows)
      self.about = self.about | {"removed": None}

  def _mark(self, rows):
    self.alive = np.ones(len(self), bool) if self.alive is None else self.alive
    self.alive[rows] = False

  def write_removed(self) -> None:
    if self.alive is None or self.about.get("removed"):
      return
    name = f"removed-{_next(self.path, 'removed-'):06d}"
    np.save(self.path / f"{name}.npy", np.flatnonzero(~self.alive), allow_pickle=False)
    sync(self.path / f"{name}.npy")
    sync(self.path)
    self.about = self.about | {"removed": name}

  def mask(self, where) -> np.ndarray | None:
    """bool [n]: which rows are searched; None: all."""
    if where is None:
      return self.alive
    table = self._shown if "name" in where.names() else self.table
    matching = np.asarray(where.mask(table), bool)
    return matching if self.alive is None else matching & self.alive

  @functools.cached_property
  def _shown(self):
    """The table with names as texts: to make those of other encodings so takes long."""
    at = self.table.column_names.index("name")
    return self.table.set_column(at, "name", condition_tree.shown(self.table["name"]))

  def approximate(self, queries, k):
    """The `nearest` k, which are at most `count`, by ScaNN; None where it cannot answer."""
    gone = len(self) - self.count
    asked = min(k + min(gone, 100), len(self))
    while asked <= DEPTH:
      rows, scores = self.index.search(queries, asked)
      if not gone:
        return rows, scores
      there = self.alive[rows]
      if (there.sum(axis=1) >= k).all():
        at = np.argsort(~there, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, at, axis=1), np.take_along_axis(scores, at, axis=1)
      if asked == len(self):
        return None
      asked = min(4 * asked, len(self))
    return None


class Writer:
  """Rows as they come -> a segment. Vectors go to disk at once, the rest when it is closed."""

  def __init__(self, index, width: int, precision: str):
    self._index, self._dtype, self._width = pathlib.Path(index), np.dtype(precision), width
    self.name = f"s{_next(self._index, 's'):06d}"
    self.path = self._index / self.name
    self.path.mkdir(parents=True)
    self._file = open(self.path / "vectors.npy", "wb")  # noqa: SIM115 `close` closes it
    self._file.write(self._header(0))
    self._ids, self._tables, self.rows = [], [], 0

  def _header(self, rows):
    """NumPy leaves room in it for any number of rows: its length does not depend on them."""
    out = io.BytesIO()
    about = {"descr": self._dtype.str, "fortran_order": False, "shape": (rows, self._width)}
    np.lib.format.write_array_header_1_0(out, about)
    return out.getvalue()

  def add(self, ids, vectors, columns) -> None:
    """uint64 [n], float [n, width], {column: pyarrow array [n]}."""
    np.ascontiguousarray(vectors, self._dtype).tofile(self._file)
    self._ids.append(np.asarray(ids, np.uint64))
    arrays = {name: _encoded(name, column) for name, column in columns.items()}
    self._tables.append(pa.table(arrays))
    self.rows += len(ids)

  def close(self) -> dict:
    """Everything is on the disk when this returns; -> what the manifest says of it."""
    self._file.seek(0)
    self._file.write(self._header(self.rows))
    self._file.close()
    ids = np.concatenate(self._ids)
    order = np.argsort(ids, kind="stable").astype(np.uint32)
    for name, array in (("ids", ids), ("sorted", ids[order]), ("order", order)):
      np.save(self.path / f"{name}.npy", array, allow_pickle=False)
    table = pa.concat_tables(self._tables, promote_options="default").unify_dictionaries()
    self._ids, self._tables = [], []
    table = table.combine_chunks()
    with pa.ipc.new_file(str(self.path / "rows.arrow"), table.schema) as out:
      out.write_table(table, max_chunksize=self.rows)
    sync_tree(self.path)
    sync(self._index)
    return {"name": self.name, "rows": self.rows, "ann": False}


def build_index(segment: Segment, queries=None) -> None:
  """Adds ScaNN to a segment that nobody reads yet."""
  built = scann_index.build(segment.vectors, queries=queries)
  built.save(segment.path / "ann")
  sync_tree(segment.path / "ann")
  sync(segment.path)
  segment.about = segment.about | {"ann": True}


def parts(segment: Segment):
  """What is not gone, as `Writer.add` takes it, in tiles."""
  for start in range(0, len(segment), _TILE):
    rows = np.arange(start, min(start + _TILE, len(segment)))
    rows = rows if segment.alive is None else rows[segment.alive[rows]]
    if len(rows):
      table = segment.table.take(pa.array(rows))
      columns = {name: table[name] for name in table.column_names}
      yield segment.ids[rows], segment.vectors[rows], columns


def _encoded(name, column):
  kind = OWN.get(name)
  if kind is not None and not pa.types.is_dictionary(column.type):
    column = column.cast(kind)
  if name in _SHARED and not pa.types.is_dictionary(column.type):
    column = column.dictionary_encode()
  return column


def _next(directory, prefix) -> int:
  names = (path.stem.removeprefix(prefix) for path in directory.glob(f"{prefix}[0-9]*"))
  return 1 + max((int(name) for name in names if name.isdecimal()), default=0)


def numbered(directory, letter, files):
  """Yields s000007 and the like that hold one of `files`. --out may lie among folders of others."""
  for path in directory.glob(f"{letter}[0-9]*"):
    if re.fullmatch(rf"{letter}\d{{6,}}", path.name) and any((path / x).exists() for x in files):
      yield path


def sync_tree(directory) -> None:
  for folder, _, files in os.walk(directory):
    for name in files:
      sync(os.path.join(folder, name))
    sync(folder)
