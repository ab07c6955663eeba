"""A searchable collection: a store of vectors, captions, and where the images are from.

INDEX/collection.json   what it holds and which generation is current; replaced in one step, after
                        everything that it names is safe on the disk
INDEX/s000012/          segments of the store, if it is of files (stores/segments.py)
INDEX/g000007/          the rest of a generation, which never changes:
  captions.bin, .npy      distinct captions of the sources, and where each begins
  caption_vectors.npy     float32 [C, width]
  skipped.tsv             files that could not be read, and why
  calibration.json        with bank.npz: as they were when the index was made
INDEX/partial/          what interrupted runs have embedded of each source (chunks.py)
"""

import functools
import json
import os
import pathlib

import numpy as np

from xe_retrieval.search import filters, image_sources, stores
from xe_retrieval.search.stores import nearest, segments

FORMAT = 2
MANIFEST = "collection.json"


class Strings:
  """Many strings in one file, read as needed."""

  def __init__(self, directory, name):
    self._starts = np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    size = int(self._starts[-1])
    self._bytes = np.memmap(directory / f"{name}.bin", np.uint8, "r") if size else b""

  def __len__(self):
    return len(self._starts) - 1

  def __getitem__(self, i):
    if not 0 <= i < len(self):
      raise IndexError(i)
    return os.fsdecode(bytes(self._bytes[self._starts[i] : self._starts[i + 1]]))

  @staticmethod
  def write(directory, name, strings):
    starts = [np.zeros(1, np.int64)]
    with open(directory / f"{name}.bin", "wb") as file:
      for some in strings:  # lists of them
        sizes = [file.write(os.fsencode(string)) for string in some]
        starts.append(starts[-1][-1] + np.cumsum(sizes, dtype=np.int64))
    np.save(directory / f"{name}.npy", np.concatenate(starts), allow_pickle=False)


class Collection:
  """The current generation of an index. Images are known by their ids, uint64."""

  def __init__(self, path, writing=False, store=True):
    """`store=False`: without its vectors, and only what the manifest and the files beside say."""
    self.path = pathlib.Path(path).expanduser()
    for attempt in range(5):
      self.manifest = read_manifest(self.path)
      try:
        self._open(self.path / self.manifest["generation"], writing, store)
        return
      except FileNotFoundError as e:  # replaced twice while it was opened: retry
        if attempt == 4:
          raise ValueError(f"{path} is damaged: {e.filename} is missing") from e

  def _open(self, directory, writing, store):
    self.directory = directory
    self.captions = Strings(directory, "captions")
    self.caption_vectors = np.load(
      directory / "caption_vectors.npy", mmap_mode="r", allow_pickle=False
    )
    # By the label that each got when it was added.
    self.sources = {
      about["label"]: image_sources.from_key(about["key"]) for about in self.manifest["sources"]
    }
    self.store = None
    if store:
      about, columns = self.manifest["store"], self.manifest["columns"]
      self.store = stores.open(self.path, about, columns, writing)
    self.where = functools.partial(filters.where, self.store)

  def __len__(self):
    return self.manifest["images"]

  def search(self, queries, k):
    """float32 [Q, width] -> uint64 [Q, k'] ids, float32 [Q, k'] scores, k' = min(k, N)."""
    return self.store.nearest(queries, k)

  def search_captions(self, queries, k):
    """float32 [Q, width] -> int64 [Q, k'] numbers of captions, float32 [Q, k'] scores."""
    return nearest.nearest(self.caption_vectors, queries, min(k, len(self.captions)))

  def find(self, id: str) -> np.uint64 | None:
    """The image with this id in hexadecimal, if it is (still) in the collection."""
    wanted = np.array([int(id, 16)], np.uint64)
    return wanted[0] if self.store.has(wanted)[0] else None

  def describe(self, ids) -> list[dict]:
    """For people: what is not UTF-8 in names is replaced."""
    found = self.store.fetch(ids, ("source", "folder", "name", "date"))
    return [
      {
        "id": f"{int(id):016x}",
        "image": image_sources.readable(os.fsdecode(name)),
        "path": image_sources.readable(self.sources[source].full_name(os.fsdecode(name))),
        "folder": folder,
        "date": filters.day(date),
      }
      for id, source, folder, name, date in zip(ids, *found.values(), strict=True)
    ]

  def dates(self, ids) -> np.ndarray:
    """int64 [n]: nanoseconds since 1970; −1: not known."""
    return np.array(self.store.fetch(ids, ("date",))["date"], np.int64)

  def stamp(self, id) -> tuple[int, int]:
    """Two numbers that differ after the picture has changed."""
    found = self.store.fetch(np.array([id]), ("stamp_size", "stamp_time"))
    return found["stamp_size"][0], found["stamp_time"][0]

  def picture(self, id) -> bytes:
    """The file as it is now; OSError or ValueError if it cannot be read."""
    found = self.store.fetch(np.array([id]), ("source", "name"))
    return self.sources[found["source"][0]].read(os.fsdecode(found["name"][0]))


def read_manifest(path) -> dict:
  path = pathlib.Path(path)
  try:
    manifest = json.loads((path / MANIFEST).read_text())
    version = manifest["format"]
  except FileNotFoundError:
    raise ValueError(
      f"{path} holds no index; python -m xe_retrieval.index --workdir=… --images=… --out={path} "
      "makes one"
    ) from None
  except (NotADirectoryError, ValueError, KeyError, TypeError) as e:
    raise ValueError(f"{path / MANIFEST} is not that of an index ({e})") from e
  if version != FORMAT:
    raise ValueError(f"{path} has format {version}, this version reads {FORMAT}: index anew")
  return manifest


def write_manifest(path, content: dict) -> None:
  """In one step, and lasting: a reader sees the old or the new file, also after a power failure."""
  part = path / f"{MANIFEST}.part"
  part.write_text(json.dumps(content, indent=2) + "\n")
  segments.sync(part)
  part.replace(path / MANIFEST)
  segments.sync(path)
