"""All of a split but its images, as columns beside the shards: ids and captions without the rest.

columns/SPLIT/ holds NAME.npy for each feature. Of lists, NAME.rows.npy says where the values of a
record begin; of strings, NAME.starts.npy where each string begins among the bytes. about.json,
written last, has the hash of all records and the sizes of the shards that they were read from.
"""

import collections
import hashlib
import itertools
import json
import math
import mmap
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np

from xe_retrieval.data import lock
from xe_retrieval.data.feed import examples

SPEC = {  # of every feature: is it a list, are its values strings, and the shape of other values
  "image": (False, True, ()),
  "image_id": (False, False, ()),
  "captions": (True, True, ()),
  "text_ids": (True, False, ()),
  "file": (False, True, ()),
  "caption_ids": (True, True, ()),
  "scene": (False, False, (3, 4)),
}
BLOCK = 1024  # records that are parsed at once


class _Blocks(Sequence):
  """A sequence that is read from disk a slice at a time."""

  def __getitem__(self, i):
    if isinstance(i, slice):
      begin, stop, _ = i.indices(len(self))
      return self._block(begin, max(begin, stop))
    i = i + len(self) if i < 0 else i
    if not 0 <= i < len(self):
      raise IndexError(i)
    return self._block(i, i + 1)[0]

  def __iter__(self):
    for begin in range(0, len(self), 4096):
      yield from self._block(begin, min(begin + 4096, len(self)))
      self._release()


class Strings(_Blocks):
  """Many strings in one array of bytes; as str if `text`, else as bytes."""

  def __init__(self, data, starts, text: bool = False):  # uint8 [bytes], int64 [n + 1]
    self._data, self._starts, self._text = data, starts, text

  def __len__(self):
    return len(self._starts) - 1

  def as_text(self) -> "Strings":
    return Strings(self._data, self._starts, text=True)

  def _release(self):
    """Gives pages that were read back to the kernel: they would count as this process's memory."""
    if isinstance(self._data, np.memmap):
      self._data._mmap.madvise(mmap.MADV_DONTNEED)

  def _block(self, begin, stop):
    starts = self._starts[begin : stop + 1].tolist()
    data = self._data[starts[0] : starts[-1]].tobytes()
    cut = [data[a - starts[0] : b - starts[0]] for a, b in itertools.pairwise(starts)]
    return [string.decode("utf-8", "replace") for string in cut] if self._text else cut


class Lists(_Blocks):
  """One list for each record: `flat` are the values of all, `starts` where each record's begin."""

  def __init__(self, flat, starts):  # [m], int64 [n + 1]
    self.flat, self.starts = flat, starts

  def __len__(self):
    return len(self.starts) - 1

  def _release(self):
    if isinstance(self.flat, Strings):
      self.flat._release()

  @property
  def counts(self) -> np.ndarray:
    return np.diff(self.starts)  # int64 [n]

  def _block(self, begin, stop):
    starts = self.starts[begin : stop + 1].tolist()
    values = self.flat[starts[0] : starts[-1]]
    values = values if isinstance(values, list) else values.tolist()
    return [values[a - starts[0] : b - starts[0]] for a, b in itertools.pairwise(starts)]


class Columns:
  """The columns in a directory, memory-mapped."""

  def __init__(self, directory):
    self._directory = pathlib.Path(directory)
    self.about = json.loads((self._directory / "about.json").read_text())

  def __getitem__(self, name: str) -> np.ndarray | Strings | Lists:
    ragged, strings, _ = SPEC[name]
    values = self._load(name)
    values = Strings(values, self._load(f"{name}.starts")) if strings else values
    return Lists(values, self._load(f"{name}.rows")) if ragged else values

  def _load(self, name):
    return np.load(self._directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def find(directory, shards: list) -> Columns | None:
  """Those in `directory`, if there are any and they were made of these shards."""
  if not (pathlib.Path(directory) / "about.json").exists():
    return None
  found = Columns(directory)
  return found if found.about["shards"] == _sizes(shards) else None


def find_or_make(directory, shards: list, names, count: int, read) -> Columns:
  """Those in `directory`; made first if there are none, or of other shards.

  `read()` gives the blocks of `write`. Where nothing can be written, they are held in memory.
  """
  directory = pathlib.Path(directory)
  if found := find(directory, shards):
    return found
  try:
    with lock.creating(directory):
      if not find(directory, shards):
        write(directory, shards, names, count, read())
    return Columns(directory)
  except OSError:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
      made = write(pathlib.Path(scratch) / "columns", shards, names, count, read())
      return _InMemory(made)


class _InMemory(Columns):
  """Columns whose files will be gone."""

  def __init__(self, made: Columns):
    self.about = made.about
    paths = made._directory.glob("*.npy")
    self._arrays = {path.stem: np.load(path, allow_pickle=False) for path in paths}

  def _load(self, name):
    return self._arrays[name]


def write(directory, shards: list, names, count: int, blocks: Iterable[list[bytes]]) -> Columns:
  """Blocks of all `count` serialised records in order -> their columns `names`, whole or not."""
  directory = pathlib.Path(directory)
  unfinished = directory.with_name(f".{directory.name}.{os.getpid()}")
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir(parents=True)
  try:
    digest = hashlib.sha256(str(count).encode())
    arrays = collections.defaultdict(list)
    for block in blocks:
      for record in block:
        digest.update(record)
      parsed = zip(*(examples.parse(record, *names) for record in block), strict=True)
      for name, lists in zip(names, parsed, strict=True):
        _add(arrays, name, lists)
    for name, parts in arrays.items():
      whole = np.concatenate(parts)
      if name.endswith((".rows", ".starts")):  # lengths so far
        whole = np.concatenate([[0], np.cumsum(whole)])
      np.save(unfinished / f"{name}.npy", whole, allow_pickle=False)
      parts.clear()
    about = {"records": count, "fingerprint": digest.hexdigest(), "shards": _sizes(shards)}
    (unfinished / "about.json").write_text(json.dumps(about))
    shutil.rmtree(directory, ignore_errors=True)  # of other shards
    unfinished.rename(directory)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
  return Columns(directory)


def _add(arrays, name, lists):
  """Appends the values of one feature, a list for each record."""
  ragged, strings, shape = SPEC[name]
  values = list(itertools.chain.from_iterable(lists))
  if ragged:
    arrays[f"{name}.rows"].append(_lengths(lists))
  elif len(values) != len(lists) * math.prod(shape):
    raise ValueError(f"a record has no {name!r}, or several")
  if strings:
    arrays[f"{name}.starts"].append(_lengths(values))
    arrays[name].append(np.frombuffer(b"".join(values), np.uint8))
  else:
    arrays[name].append(np.array(values, np.int64).reshape(-1, *shape))


def _lengths(values):
  return np.fromiter(map(len, values), np.int64, len(values))


def _sizes(shards):
  return {os.path.basename(path): os.path.getsize(path) for path in map(str, shards)}
