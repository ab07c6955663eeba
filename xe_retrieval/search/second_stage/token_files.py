"""What a re-ranker stores of the images of a collection, beside either kind of store.

INDEX/tokens/<re-ranker>/   named by the start of its fingerprint; for each few thousand images
  000001.ids.npy              uint64 [n, 3]: id and the two stamps of the picture, as in the store
  000001.tokens.npy           float16 [n, tokens, width], memory-mapped

Files are only added: an image that has changed is in a later one, and one that is gone is never
asked for.
"""

import os
import pathlib
import sys

import numpy as np
import tqdm

from xe_retrieval.data import decoding
from xe_retrieval.search import chunks
from xe_retrieval.search.collection import Collection
from xe_retrieval.search.stores import segments

CHUNK = 2048  # images whose tokens are computed before they are safe on disk
_AT_ONCE = 64  # decoded pictures in memory


class TokenFiles:
  """The files of one re-ranker, as they are now."""

  def __init__(self, index, fingerprint: str):
    self.directory = pathlib.Path(index).expanduser() / "tokens" / fingerprint[:16]
    marks, self._tables, file, row = [np.zeros((0, 3), np.uint64)], [], [], []
    for n, path in enumerate(sorted(self.directory.glob("*.ids.npy"))):
      marks.append(np.load(path, allow_pickle=False))
      tokens = path.with_name(path.name.replace(".ids.", ".tokens."))
      self._tables.append(np.load(tokens, mmap_mode="r", allow_pickle=False))
      file.append(np.full(len(marks[-1]), n))
      row.append(np.arange(len(marks[-1])))
    marks = np.concatenate(marks)
    # What was written last is newest.
    self.ids, last = np.unique(marks[::-1, 0], return_index=True)
    at = len(marks) - 1 - last
    self._stamps = marks[at, 1:]
    self._file, self._row = (np.concatenate([np.zeros(0, int), *x])[at] for x in (file, row))

  def lacking(self, ids, stamps):
    """uint64 [n], int64 [n, 2] -> bool [n]: which pictures have no tokens as they are now."""
    at, there = chunks.lookup(self.ids, ids)
    there[there] = (self._stamps[at[there]] == stamps[there].astype(np.uint64)).all(axis=1)
    return ~there

  def read(self, ids):
    """uint64 [n] -> float16 [m, tokens, width], bool [n]: those of the m images that have some."""
    at, there = chunks.lookup(self.ids, ids)
    at = at[there]
    parts = [self._tables[f][r] for f, r in zip(self._file[at], self._row[at], strict=True)]
    return np.stack(parts) if parts else np.zeros((0, 0, 0), np.float16), there

  def add(self, ids, stamps, tokens) -> None:
    """One more file of each kind; the ids last, so that tokens are whole where there are ids."""
    self.directory.mkdir(parents=True, exist_ok=True)
    numbers = [int(p.name.partition(".")[0]) for p in self.directory.glob("*.ids.npy")]
    name = f"{max(numbers, default=0) + 1:06d}"
    marks = np.concatenate([ids[:, None], stamps.astype(np.uint64)], axis=1)
    for kind, array in (("tokens", tokens), ("ids", marks)):
      part = self.directory / f".{name}.{kind}.{os.getpid()}"
      with part.open("wb") as file:
        np.save(file, array, allow_pickle=False)
      segments.sync(part)
      part.replace(self.directory / f"{name}.{kind}.npy")
    segments.sync(self.directory)


def update(index, towers, scorer) -> tuple[int, int]:
  """Stores the tokens of all pictures that have none yet -> how many, how many cannot be read.

  Interrupted, it goes on from the last chunk.
  """
  collection = Collection(index)
  files = TokenFiles(index, scorer.fingerprint)
  done = failed = 0
  for label in collection.sources:
    ids, stamps = collection.store.known(label)
    new = np.flatnonzero(files.lacking(ids, stamps))
    with tqdm.tqdm(total=len(new), unit=" images' tokens", delay=2, file=sys.stderr) as bar:
      for start in range(0, len(new), CHUNK):
        rows, tokens = _of_pictures(collection, ids, new[start : start + CHUNK], towers, scorer)
        if len(rows):
          files.add(ids[rows], stamps[rows], tokens)
        done, failed = done + len(rows), failed + len(new[start : start + CHUNK]) - len(rows)
        bar.update(len(new[start : start + CHUNK]))
  return done, failed


def _of_pictures(collection, ids, rows, towers, scorer):
  """-> those of `rows` whose pictures can be read, float16 [n, tokens, width]."""
  view = decoding.View.of(towers.config.image)
  good = []

  def squares():
    batch = []
    for row in rows:
      try:
        batch.append(decoding.square(collection.picture(ids[row]), view=view))
      except (OSError, ValueError):  # gone or changed since it was indexed
        continue
      good.append(row)
      if len(batch) == _AT_ONCE:
        yield np.stack(batch)
        batch = []
    if batch:
      yield np.stack(batch)

  parts = list(scorer.compress(towers.images(squares())))
  empty = np.zeros((0, *scorer.image_shape), np.float16)
  return np.array(good, np.int64), np.concatenate([empty, *parts])
