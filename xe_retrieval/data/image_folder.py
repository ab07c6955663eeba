"""A folder of pictures without captions: which files it holds, and their records for the pipeline.

Imports no TensorFlow: search walks folders, too.
"""

import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import NamedTuple

from xe_retrieval.preparation import image_files, records
from xe_retrieval.preparation.rejections import Rejected

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class Entry(NamedTuple):
  """One picture: its name in the source, and two numbers that change if the picture does."""

  name: str
  stamp: tuple[int, int]


def walk(folder: pathlib.Path) -> list[Entry]:
  """Every picture under a folder by its path from there, sorted; hidden ones are left out."""
  if not folder.is_dir():
    raise ValueError(f"{folder} is no folder")
  found = []
  for directory, folders, files in os.walk(folder):
    folders[:] = [name for name in folders if not name.startswith(".")]
    for file in files:
      if file.lower().endswith(SUFFIXES) and not file.startswith("."):
        path = os.path.join(directory, file)
        found.append(Entry(os.path.relpath(path, folder), _stamp(path)))
  return sorted(found)


def stream(folder: pathlib.Path, wanted=None, stamps: bool = True) -> Iterator[Entry]:
  """As `walk`, in no order and without a list of all; only names that are `wanted` are looked at.

  A folder that cannot be listed is yielded, too, its name ending in /: reading it says so.
  """
  if not folder.is_dir():
    raise ValueError(f"{folder} is no folder")
  pending = [""]
  while pending:
    prefix = pending.pop()
    names = []
    try:
      with os.scandir(os.path.join(folder, prefix)) as entries:
        for entry in entries:
          if entry.name.startswith("."):
            continue
          if _is_folder(entry):
            if not entry.is_symlink():
              pending.append(f"{prefix}{entry.name}/")
          elif entry.name.lower().endswith(SUFFIXES):
            names.append(f"{prefix}{entry.name}")
            if len(names) == 1024:  # a single folder may hold millions
              yield from _entries(folder, names, wanted, stamps)
              names = []
    except OSError as e:
      if not prefix:
        raise ValueError(f"{folder} cannot be listed ({e.strerror})") from e
      names.append(prefix)
    yield from _entries(folder, names, wanted, stamps)


def _entries(folder, names, wanted, stamps):
  for name in names:
    if wanted is None or wanted(name):
      yield Entry(name, _stamp(os.path.join(folder, name)) if stamps else (-1, -1))


def _is_folder(entry):
  try:
    return entry.is_dir()
  except OSError:
    return False


def _stamp(path):
  try:
    about = os.stat(path)
  except OSError:  # a dangling link: reading it will say so
    return -1, -1
  return about.st_size, about.st_mtime_ns


def read(path: pathlib.Path) -> bytes:
  """The bytes of a picture; OSError or ValueError if it cannot be read or is too large."""
  mode = os.stat(path).st_mode
  if not stat.S_ISREG(mode):  # reading a pipe would wait forever
    raise ValueError("a folder that cannot be listed" if stat.S_ISDIR(mode) else "no regular file")
  with open(path, "rb") as file:
    data = file.read(image_files.MAX_BYTES + 1)
  if len(data) > image_files.MAX_BYTES:
    raise ValueError(f"more than {image_files.MAX_BYTES >> 20} MB")
  return data


class ImageFolder:
  """The pictures of a folder as a split whose records have an image and nothing else.

  Each is normalised as `prepare` would by default, so that it looks like one of a prepared data
  set. What is no readable picture becomes an empty image, which the pipeline shows grey and logs.
  """

  split = "images"
  features = {}  # no columns besides the image

  def __init__(self, folder: str):
    self.name = str(folder)
    self._folder = pathlib.Path(folder).expanduser().resolve()
    self._entries = walk(self._folder)
    if not self._entries:
      raise ValueError(f"{folder} holds no pictures (files that end in {', '.join(SUFFIXES)})")

  def __len__(self) -> int:
    return len(self._entries)

  def read(self, indices) -> list[bytes]:
    """Serialised records."""
    return [records.example(image=[self.image(int(i))]) for i in indices]

  def image(self, index: int) -> bytes:
    """The picture as a JPEG; empty if it is broken."""
    try:
      data = read(self._folder / self._entries[index].name)
      return image_files.check(data, _OPTIONS.max_side, _OPTIONS.max_pixels)[0]
    except (OSError, ValueError, Rejected):
      return b""

  def captions(self) -> None:
    """Nobody has described these pictures."""

  def fingerprint(self) -> str:
    """A hash of every name, size and time of change.

    Not of the bytes, as for prepared data: reading a large folder takes minutes, which each
    evaluation would wait for before it finds its cached features.
    """
    return hashlib.sha256(json.dumps([_OPTIONS.plan(), self._entries]).encode()).hexdigest()


_OPTIONS = records.Options()


def open_images(text: str, directory: str = ""):
  """DIR, or DATASET:SPLIT whose data lie under `directory` -> a source of images to read."""
  if pathlib.Path(text).expanduser().is_dir():
    return ImageFolder(text)
  name, colon, split = text.rpartition(":")
  if not colon:
    raise ValueError(
      f"{text} is neither a folder of pictures nor a data set with its split, as in "
      "shapes/20000:train"
    )
  from xe_retrieval.data import pipeline

  return pipeline.Source(name, directory, split)
