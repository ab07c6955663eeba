"""A directory of embeddings as a source of a collection, and as distractors of an evaluation."""

import contextlib
import os
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tqdm

from xe_retrieval.data import paths
from xe_retrieval.data.image_folder import Entry
from xe_retrieval.embed import directory, vector_files
from xe_retrieval.search import image_sources


def open_directory(path, fingerprint: str) -> "Embeddings":
  """ValueError, one sentence, unless all parts are done, intact, and by this model."""
  path = paths.local(path, "reading embeddings")
  status = directory.status(path)
  if status.plan.model != fingerprint:
    raise ValueError(
      f"{path} holds vectors of another model (step {status.plan.step}): give the --workdir it was "
      "embedded with, or embed anew"
    )
  if status.damaged:
    raise ValueError(next(iter(status.damaged.values())))
  if status.missing:
    missing, parts = directory.spans(status.missing), status.plan.parts
    raise ValueError(
      f"{path} is not complete: of {parts} parts, these are not done: {missing}; embed them first"
    )
  return Embeddings(path, status)


class Embeddings:
  """All parts of a directory, one file at a time."""

  def __init__(self, path, status):
    self.path, self.plan, self.pictures = path, status.plan, status.pictures
    self._done = [
      directory.read_done(path, self.plan, part) for part in range(1, self.plan.parts + 1)
    ]

  def names(self):
    """Yields (names list of bytes [n], stamps int64 [n, 2]) of each file, without its vectors."""
    for done in self._done:
      where = directory.folder(self.path, done.part, done.parts)
      for name in done.files:
        try:
          table = pq.read_table(where / name, columns=["name", "stamp_size", "stamp_time"])
        except (OSError, ValueError, KeyError, pa.ArrowException) as e:
          why = (str(e).splitlines() or [""])[0]
          again = f"embed part {done.part}/{done.parts} again"
          raise ValueError(f"{where / name} is damaged ({why}); {again}") from e
        stamps = [table[f"stamp_{x}"].to_numpy() for x in ("size", "time")]
        yield table["name"].to_pylist(), np.stack(stamps, axis=1)

  def tables(self):
    """Yields each file, its checksum verified."""
    for done in self._done:
      for _, table in directory.read_files(self.path, self.plan, done):
        yield table

  def skipped(self):
    """Yields (name, reason)."""
    for done in self._done:
      for line in directory.read_skipped(self.path, done):
        yield line["name"], line["reason"]

  def vectors(self) -> np.ndarray:
    """float32 [pictures, D]: the unit vectors alone."""
    out, at = np.empty((self.pictures, self.plan.dimensions), np.float32), 0
    for table in self.tables():
      part = vector_files.vectors(table)[:, : self.plan.dimensions]
      out[at : at + len(part)] = part
      at += len(part)
    return out


class EmbeddedSource:
  """The source that was embedded, as it was then: for update_index, which embeds nothing of it.

  Where pictures and captions are asked for, it is the source itself.
  """

  def __init__(self, embeddings: Embeddings):
    self._embeddings = embeddings
    self._source = image_sources.from_key(embeddings.plan.source)

  def __getattr__(self, name):
    return getattr(self._source, name)

  def entries(self, wanted=None):
    for names, stamps in self._embeddings.names():
      for name, stamp in zip(map(os.fsdecode, names), stamps.tolist(), strict=True):
        if wanted is None or wanted(name):
          yield Entry(name, tuple(stamp))

  def count(self, wanted=None) -> int:
    return sum(1 for _ in self.entries(wanted))

  def chunks(self) -> "Chunks":
    """What search.chunks.Chunks is for files of an interrupted run."""
    return Chunks(self._embeddings)

  def skipped(self) -> list[tuple[str, str]]:
    """Each once: a folder that no worker could list is in the lists of all parts."""
    return list(dict.fromkeys(self._embeddings.skipped()))


class Chunk(NamedTuple):
  ids: np.ndarray  # uint64 [n]
  names: list[bytes]
  vectors: np.ndarray  # float32 [n, width]
  stamps: np.ndarray  # int64 [n, 2]


class Chunks:
  """The rows of all files that a collection wants: in memory are 8 bytes for each."""

  def __init__(self, embeddings):
    self._embeddings, self._taken = embeddings, []

  def take(self, ids, stamps) -> np.ndarray:
    """uint64 [n] of entries of this very directory -> bool [n]: all are here."""
    self._taken.append(np.array(ids, np.uint64))
    return np.ones(len(ids), bool)

  def ids(self) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint64), *self._taken])

  def __iter__(self):
    wanted = np.sort(self.ids())
    if not len(wanted):
      return
    with tqdm.tqdm(total=len(wanted), unit=" vectors", delay=2, file=sys.stderr) as bar:
      for table in self._embeddings.tables():
        ids = table["id"].to_numpy()
        at = np.minimum(np.searchsorted(wanted, ids), len(wanted) - 1)
        rows = np.flatnonzero(wanted[at] == ids)
        if len(rows):
          some = table.take(pa.array(rows))
          stamps = [some[f"stamp_{x}"].to_numpy() for x in ("size", "time")]
          vectors, stamps = vector_files.vectors(some), np.stack(stamps, axis=1)
          yield Chunk(ids[rows], some["name"].to_pylist(), vectors, stamps)
          bar.update(len(rows))


def parse(text: str, data_dir: str, fingerprint):
  """A directory of embeddings, a folder or DATASET:SPLIT -> a source of images.

  `fingerprint` () -> str is that of the model.
  """
  if directory.is_one(text):
    return EmbeddedSource(open_directory(text, fingerprint()))
  return image_sources.parse(text, data_dir)


def named(text: str, data_dir: str = ""):
  """The source that is meant, whether it is still there or not."""
  with contextlib.suppress(OSError):
    if directory.is_one(text):
      return image_sources.from_key(directory.read_plan(text).source)
  return image_sources.named(text, data_dir)
