"""A folder of pictures without captions: which files it holds, and their records for the pipeline.

Imports no TensorFlow: search walks folders, too.
"""

import hashlib
import json
import os
import pathlib
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


def walk(folder: pathlib.Path) -> Iterator[Entry]:
  """Every picture under a folder by its path from there, sorted; hidden ones are left out.

  Names of one directory at a time are in memory, and these as bytes in an Arrow array: a directory
  may hold millions.
  """
  if not folder.is_dir():
    raise ValueError(f"{folder} is no folder")
  yield from _walk(os.fsencode(folder), b"")


def count(folder: pathlib.Path) -> int:
  """How many pictures `walk` would find, without asking for their sizes."""
  return sum(
    _is_picture(os.fsencode(file)) for _, _, files in _visible(os.walk(folder)) for file in files
  )


def _visible(walked):
  for step in walked:
    step[1][:] = [name for name in step[1] if not name.startswith(".")]
    yield step


def _is_picture(name: bytes) -> bool:
  return name.lower().endswith(_SUFFIXES) and not name.startswith(b".")


def _walk(top, inside):
  names = pa.chunked_array(list(_listed(os.path.join(top, inside))), pa.binary())
  order = pc.sort_indices(names)
  for start in range(0, len(names), _LISTED):
    for name in names.take(order[start : start + _LISTED]).to_pylist():
      path = os.path.join(inside, name)
      if name.endswith(b"/"):
        yield from _walk(top, path)
        continue
      try:
        about = os.stat(os.path.join(top, path))
      except OSError:  # a dangling link: reading it will say so
        stamp = (-1, -1)
      else:
        stamp = (about.st_size, about.st_mtime_ns)
      yield Entry(os.fsdecode(path), stamp)


def _listed(directory):
  """Yields Arrow arrays of the pictures in a directory, and of the folders in it with a slash:
  so they are in the order of whole paths."""
  try:
    entries = os.scandir(directory)
  except OSError:  # may not be read, or has just gone
    return
  names = []
  with entries:
    for entry in entries:
      if entry.is_dir():
        if not entry.name.startswith(b".") and not entry.is_symlink():
          names.append(entry.name + b"/")
      elif _is_picture(entry.name):
        names.append(entry.name)
      if len(names) == _LISTED:
        yield pa.array(names, pa.binary())
        names = []
  yield pa.array(names, pa.binary())


def read(path: pathlib.Path) -> bytes:
  """The bytes of a picture; OSError or ValueError if it cannot be read or is too large."""
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
