"""A searchable collection on disk: vectors and names of images, memory-mapped.

INDEX/collection.json   what it holds and which generation is current; replaced in one step
INDEX/g000007/          a generation, which never changes:
  vectors.npy             float32 [N, width]: unit vectors, and what corrects scores (bank.Scoring)
  names.bin, names.npy    names, and where each begins; captions.* likewise
  image_sources.npy, stamps.npy which source an image is from; what it looked like (size, time)
  ids.npy, order.npy      uint64 [N], a hash of source and name; rows sorted by it
  caption_vectors.npy     float32 [C, width], of the distinct captions, where sources know any
  ann/                    ScaNN's hashes, if there are many images; no vectors, no pickle
  skipped.tsv             files that could not be read, and why
INDEX/partial/          what an interrupted run has embedded so far
"""

import json
import os
import pathlib

import numpy as np

from xe_retrieval.search import filters, image_sources
from xe_retrieval.search.stores import nearest, scann_index

FORMAT = 1
MANIFEST = "collection.json"
EXACT_BELOW = 250_000  # a query takes about 5 ms per 100,000 images exactly
SCANN_DEPTH = 1_000  # what lies deeper is found faster by comparing with every image


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
    starts = [0]
    with open(directory / f"{name}.bin", "wb") as file:
      for string in strings:
        starts.append(starts[-1] + file.write(os.fsencode(string)))
    np.save(directory / f"{name}.npy", np.array(starts, np.int64), allow_pickle=False)


class Collection:
  """The current generation of an index."""

  def __init__(self, path):
    self.path = pathlib.Path(path).expanduser()
    for attempt in range(5):
      self.manifest = read_manifest(self.path)
      try:
        self._open(self.path / self.manifest["generation"])
        return
      except FileNotFoundError as e:  # replaced twice between two lines: look again
        if attempt == 4:
          raise ValueError(f"{path} is damaged: {e.filename} is missing") from e

  def _open(self, directory):
    def load(name):
      return np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    self.directory = directory
    self.vectors, self.ids, self._order = load("vectors"), load("ids"), load("order")
    self.stamps, self.source_of = load("stamps"), load("sources")
    self.names, self.captions = Strings(directory, "names"), Strings(directory, "captions")
    self.caption_vectors = load("caption_vectors")
    self.sources = [image_sources.from_key(key) for key in self.manifest["sources"]]
    ann = directory / "ann"
    self._index = scann_index.load(ann, self.vectors) if ann.exists() else None
    self.filters = filters.Filters(self)

  def __len__(self):
    return len(self.vectors)

  def search(self, queries, k):
    """float32 [Q, width] -> int64 [Q, k'] rows, float32 [Q, k'] scores, k' = min(k, N)."""
    k = min(k, len(self))
    if self._index and k <= SCANN_DEPTH:
      return self._index.search(queries, k)
    return nearest.nearest(self.vectors, queries, k)

  def scan(self, queries, k, least, mask=None, exact=False):
    """`search`, and all scores from `least` [Q] on; see nearest.scan.

    Third, None instead of the scores where an approximate index has answered, which it does not if
    `exact`.
    """
    k = min(k, len(self) if mask is None else int(np.count_nonzero(mask)))
    if self._index and k <= SCANN_DEPTH and mask is None and not exact:
      return *self.search(queries, k), None
    return nearest.scan(self.vectors, queries, k, least, mask)

  def search_captions(self, queries, k):
    """float32 [Q, width] -> int64 [Q, k'] numbers of captions, float32 [Q, k'] scores."""
    return nearest.nearest(self.caption_vectors, queries, min(k, len(self.captions)))

  def id(self, row) -> str:
    return f"{self.ids[row]:016x}"

  def row(self, id: str) -> int | None:
    """The image with this id, if it is (still) in the collection."""
    wanted = np.uint64(int(id, 16))
    place = np.searchsorted(self.ids, wanted, sorter=self._order)
    row = self._order[place] if place < len(self) else None
    return int(row) if row is not None and self.ids[row] == wanted else None

  def name(self, row) -> str:
    """For people: what is not UTF-8 is replaced."""
    return os.fsencode(self.names[row]).decode("utf-8", "replace")

  def full_name(self, row) -> str:
    name = self.sources[self.source_of[row]].full_name(self.names[row])
    return os.fsencode(name).decode("utf-8", "replace")

  def picture(self, row) -> bytes:
    """The file as it is now; OSError or ValueError if it cannot be read."""
    return self.sources[self.source_of[row]].read(self.names[row])


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


def write_json(path, content) -> None:
  """In one step: a reader sees the old or the new file."""
  part = path.with_name(path.name + ".part")
  part.write_text(json.dumps(content, indent=2) + "\n")
  part.replace(path)
