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

import pyarrow as pa
import pyarrow.compute as pc

from xe_retrieval.preparation import image_files, records
from xe_retrieval.preparation.rejections import Rejected

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)
_LISTED = 1 << 16  # names at once


class Entry(NamedTuple):
  """One picture: its name in the source, and two numbers that change if the picture does."""

  name: str
  stamp: tuple[int, int]


def walk(folder: pathlib.Path, wanted=None) -> Iterator[Entry]:
  """Every picture under a folder by its path from there, sorted; hidden ones are left out.

  Names of one directory at a time are in memory, and these as bytes in an Arrow array: a directory
  may hold millions. Only pictures whose name is `wanted` are asked for their size. A folder that
  cannot be listed is an entry, too, its name ending in /: reading it says so.
  """
  for path, listed in _names(folder):
    name = os.fsdecode(path)
    if wanted is None or wanted(name):
      yield Entry(name, _stamp(os.path.join(os.fsencode(folder), path)) if listed else (-1, -1))


def count(folder: pathlib.Path, wanted=None) -> int:
  """How many entries `walk` would find, without asking for their sizes."""
  return sum(wanted is None or wanted(os.fsdecode(path)) for path, _ in _names(folder))


def _names(folder):
  if not folder.is_dir():
    raise ValueError(f"{folder} is no folder")
  return _walk(os.fsencode(folder), b"")


def _stamp(path):
  try:
    about = os.stat(path)
  except OSError:  # a dangling link: reading it will say so
    return -1, -1
  return about.st_size, about.st_mtime_ns


def _walk(top, inside):
  """Yields (path, True) of pictures, (path, False) of folders that cannot be listed."""
  try:
    names = pa.chunked_array(list(_listed(os.path.join(top, inside))), pa.binary())
  except OSError as e:
    if not inside:
      raise ValueError(f"{os.fsdecode(top)} cannot be listed ({e.strerror})") from e
    yield inside, False
    return
  order = pc.sort_indices(names)
  for start in range(0, len(names), _LISTED):
    for name in names.take(order[start : start + _LISTED]).to_pylist():
      path = os.path.join(inside, name)
      if name.endswith(b"/"):
        yield from _walk(top, path)
      else:
        yield path, True


def _listed(directory):
  """Yields Arrow arrays of the pictures in a directory, and of the folders in it with a slash:
  so they are in the order of whole paths."""
  names = []
  with os.scandir(directory) as entries:
    for entry in entries:
      if _is_folder(entry):
        if not entry.name.startswith(b".") and not entry.is_symlink():
          names.append(entry.name + b"/")
      elif _is_picture(entry.name):
        names.append(entry.name)
      if len(names) == _LISTED:
        yield pa.array(names, pa.binary())
        names = []
  yield pa.array(names, pa.binary())


def _is_folder(entry):
  try:
    return entry.is_dir()
  except OSError:  # links that go round in a circle
    return False


def _is_picture(name: bytes) -> bool:
  return name.lower().endswith(_SUFFIXES) and not name.startswith(b".")


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


def disk_answers(path) -> bool:
  """Whether the beginning of a file can be read from the disk itself, and not from memory."""
  try:
    with open(path, "rb", buffering=0) as file:
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
      return bool(file.read(4096))
  except OSError:
    return False


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
    self._entries = list(walk(self._folder))
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
