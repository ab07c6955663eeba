"""Where the pictures of a collection come from: a folder of files, or a prepared data set."""

import hashlib
import os
import pathlib
import re
import zlib

import numpy as np

from xe_retrieval.data import image_folder
from xe_retrieval.data.image_folder import Entry


class Folder:
  """Every picture under a directory, by its path from there."""

  has_captions = False

  def __init__(self, path):
    self.path = pathlib.Path(path).expanduser().resolve()
    self.key = f"folder:{self.path}"

  def entries(self) -> list[Entry]:
    return image_folder.walk(self.path)

  def stream(self, wanted=None, stamps=True):
    """Yields the entries whose names are `wanted`, in any order; holds no list of all."""
    return image_folder.stream(self.path, wanted, stamps)

  def check(self) -> None:
    """ValueError if the folder itself is gone, as where a disk was unmounted."""
    if not self.path.is_dir():
      raise ValueError(f"{self.path} is no folder any more")

  def read(self, name: str) -> bytes:
    return image_folder.read(self.path / name)

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

  def entries(self) -> list[Entry]:
    images, captions = self._source.column("image_id"), self._source.column("captions")
    found = {}
    for number, (image, texts) in enumerate(zip(images.tolist(), captions, strict=True)):
      # A data set made anew may count its images as before: other captions tell it.
      stamp = (image, zlib.crc32(b"\0".join(texts)))
      found.setdefault(image, Entry(f"{number:08d}", stamp))
    return list(found.values())

  def stream(self, wanted=None, stamps=True):
    """Those of `entries` whose names are wanted."""
    images, captions = self._source.column("image_id"), self._source.column("captions")
    for number in np.sort(np.unique(images, return_index=True)[1]).tolist():
      name = f"{number:08d}"
      if wanted is None or wanted(name):
        stamp = (int(images[number]), zlib.crc32(b"\0".join(captions[number])))
        yield Entry(name, stamp if stamps else (-1, -1))

  def check(self) -> None:
    """Reading a record of a data set that is gone is an error, see `read`."""

  def captions(self) -> list[str]:
    """Each distinct caption once, in order."""
    return list(dict.fromkeys(self._source.captions().flat))

  def read(self, name: str) -> bytes:
    return self._source.image(int(name))

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


def image_id(key: str, name: str) -> int:
  """64 bits of a source's key and the name in it, by which an image is known everywhere."""
  digest = hashlib.blake2b(os.fsencode(f"{key}\0{name}"), digest_size=8)
  return int.from_bytes(digest.digest())
