"""Where the pictures of a collection come from: a folder of files, or a prepared data set."""

import hashlib
import os
import pathlib
import re
import zlib
from collections.abc import Iterator

import numpy as np

from xe_retrieval.data import image_folder
from xe_retrieval.data.image_folder import Entry


class Folder:
  """Every picture under a directory, by its path from there."""

  has_captions = False

  def __init__(self, path):
    self.path = pathlib.Path(path).expanduser().resolve()
    self.key = f"folder:{self.path}"

  @property
  def label(self) -> str:
    """The source's name for people."""
    return readable(self.path.name) or "images"

  def entries(self, wanted=None) -> Iterator[Entry]:
    """Sorted; those whose name is `wanted`."""
    return image_folder.walk(self.path, wanted)

  def count(self, wanted=None) -> int:
    return image_folder.count(self.path, wanted)

  def check(self) -> None:
    """ValueError if the folder itself is gone, as where a disk was unmounted."""
    if not self.path.is_dir():
      raise ValueError(f"{self.path} is no folder any more")

  def read(self, name: str) -> bytes:
    return image_folder.read(self.path / name)

  def answers(self, names) -> bool:
    """Whether the disk gives any of these pictures now."""
    return any(image_folder.disk_answers(self.path / name) for name in names)

  def full_name(self, name: str) -> str:
    return str(self.path / name)


class Dataset:
  """Every image of a split, by its record number; knows captions."""

  has_captions = True

  def __init__(self, name: str, split: str, directory: str):
    self.name, self.split = name, split
    self.directory = os.path.abspath(os.path.expanduser(directory or "~/tensorflow_datasets"))
    self.key = f"dataset:{name}:{split}:{self.directory}"
    self._opened = None

  @property
  def _source(self):
    if self._opened is None:
      from xe_retrieval.data import pipeline

      self._opened = pipeline.Source(self.name, self.directory, self.split)
    return self._opened

  @property
  def label(self) -> str:
    return f"{self.name}:{self.split}"

  def entries(self, wanted=None) -> Iterator[Entry]:
    """By the first record of each image."""
    captions = self._source.column("captions")
    images = np.asarray(self._source.column("image_id"))
    for number, name in self._names():
      if wanted is None or wanted(name):
        # A data set made anew may count its images as before: other captions tell it.
        yield Entry(name, (int(images[number]), zlib.crc32(b"\0".join(captions[number]))))

  def count(self, wanted=None) -> int:
    return sum(wanted is None or wanted(name) for _, name in self._names())

  def _names(self):
    firsts = np.unique(self._source.column("image_id"), return_index=True)[1]
    return ((number, f"{number:08d}") for number in np.sort(firsts).tolist())

  def check(self) -> None:
    """Reading from a data set that is gone is an error, see `read`."""

  def captions(self) -> Iterator[str]:
    """All of them in order; one may come more than once."""
    return iter(self._source.captions().flat)

  def read(self, name: str) -> bytes:
    return self._source.image(int(name))

  def answers(self, names) -> bool:
    """Pictures of one file: none of them is passed over because of a disk."""
    return False

  def full_name(self, name: str) -> str:
    return f"{self.name}:{self.split}/{name}"


def parse(text: str, directory: str = ""):
  """DIR, or DATASET:SPLIT as in shapes/20000:test, whose data lie under `directory`."""
  if pathlib.Path(text).expanduser().is_dir():
    return Folder(text)
  if re.fullmatch(r"[^:]+:\w+", text):
    return named(text, directory)
  raise ValueError(
    f"{text} is neither a folder nor a data set with its split, as in shapes/20000:test"
  )


def named(text: str, directory: str = ""):
  """The same, whether it is still there or not."""
  if found := re.fullmatch(r"([^:]+):(\w+)", text):
    return Dataset(found[1], found[2], directory)
  return Folder(text)


def from_key(key: str):
  """The source that a collection remembers."""
  kind, _, rest = key.partition(":")
  return Folder(rest) if kind == "folder" else Dataset(*rest.split(":", 2))


def check_apart(path, sources) -> None:
  """ValueError if a new index at `path` would lie in a folder of pictures, or around one."""
  path = pathlib.Path(path).expanduser().resolve()
  for source in map(from_key, (source.key for source in sources)):
    if isinstance(source, Folder) and (
      path == source.path or path in source.path.parents or source.path in path.parents
    ):
      how = "around" if path in source.path.parents else "in"
      raise ValueError(
        f"--out={path} lies {how} the folder of pictures {source.path}; give the index a directory "
        "of its own beside it"
      )


def readable(name: str) -> str:
  """What is not UTF-8 is replaced."""
  return os.fsencode(name).decode("utf-8", "replace")


def ids(key: str, names: list[bytes]) -> np.ndarray:
  """uint64 [n]: hashes of a source's key and the names of images in it."""
  start = hashlib.blake2b(os.fsencode(key) + b"\0", digest_size=8)
  digests = []
  for name in names:
    digest = start.copy()
    digest.update(name)
    digests.append(digest.digest())
  return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
