"""Sources of images: a folder, a tar file, or tar shards in the layout of img2dataset.

Nothing is extracted, and nothing outside the given folder or file is read.
"""

import copy
import glob
import hashlib
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator

from braceexpand import braceexpand

from xe_retrieval.preparation import caption_tables
from xe_retrieval.preparation.caption_tables import Caption, Sample
from xe_retrieval.preparation.image_files import MAX_BYTES, is_passing
from xe_retrieval.preparation.rejections import Rejected, Rejection

_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
_MAX_TEXT = 1 << 20  # bytes of a .txt or .json


class Folder:
  """Files under a directory, by relative name; those of its folders `within` also without these."""

  def __init__(self, directory: str, within: tuple[str, ...] = ()):
    self.root, self.within = os.path.realpath(directory), within
    if not os.path.isdir(self.root):
      raise ValueError(f"--images={directory}: there is no such folder or tar file")

  def part(self, names: list[str]) -> "Folder":
    return self

  def stamp(self, names: list[str]) -> str:
    """A hash of the size and time of change of these files: it changes if one of them does."""
    return _stamp((name, self._place(name)) for name in names)

  def _place(self, name):
    places = [os.path.join(self.root, folder, name) for folder in ("", *self.within)]
    return next(filter(os.path.exists, places), places[0])

  def read(self, name: str) -> bytes:
    """The bytes of a file, at most MAX_BYTES + 1; Rejected if there is none. OSError if it
    cannot be read now, but perhaps later."""
    try:
      path = os.path.realpath(self._place(name))
      if os.path.commonpath([path, self.root]) != self.root:
        raise Rejected("outside the folder", f"points to {path[:200]!r}")
      if not stat.S_ISREG(os.stat(path).st_mode):  # reading a named pipe would block
        raise Rejected("missing file", "not a regular file")
      with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:  # ValueError: NUL in the name
      if is_passing(e):
        raise
      raise Rejected("missing file", getattr(e, "strerror", None) or str(e)) from e


class TarFolder:
  """The regular files of a tar file, by name; read in place, never extracted."""

  def __init__(self, path: str):
    self.path, self._members = absolute(path), {}
    try:
      with opened(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
          if member.isreg() and not member.issparse():
            name = member.name.removeprefix("./")
            self._members[name] = member.offset_data, member.size
    except (OSError, tarfile.TarError) as e:
      raise ValueError(f"--images={path}: should be a folder or an uncompressed tar: {e}") from e
    for name in list(self._members):  # tables may say 1.jpg for images/1.jpg
      self._members.setdefault(name.rpartition("/")[2], self._members[name])

  def part(self, names: list[str]) -> "TarFolder":
    """Only these files: less to send to a worker process."""
    out = copy.copy(self)
    out._members = {name: self._members[name] for name in names if name in self._members}
    return out

  def stamp(self, names: list[str]) -> str:
    return _stamp([("", self.path)])

  def read(self, name: str) -> bytes:
    if name not in self._members:
      raise Rejected("missing file", f"not in {os.path.basename(self.path)}")
    offset, size = self._members[name]
    with opened(self.path) as file:
      file.seek(offset)
      return file.read(min(size, MAX_BYTES + 1))


def stamp_of_shards(paths: list[str]) -> str:
  """A hash of the size and time of change of each."""
  return _stamp((os.path.basename(path), path) for path in paths)


def _stamp(files):
  return digest((name, _about(path)) for name, path in files)


def digest(files) -> str:
  """A hash of (name, size and time of change)."""
  out = hashlib.sha256()
  for name, about in files:
    out.update(f"{name}\0{about}\n".encode("utf-8", "surrogateescape"))
  return out.hexdigest()


def _about(path):
  if is_remote(path):
    return next((about for _, about in _filesystems().found(path)), "missing")
  try:
    about = os.stat(path)
    return f"{about.st_size} {about.st_mtime_ns}"
  except (OSError, ValueError):  # ValueError: NUL in the name
    return "missing"


def size(path: str) -> int:
  return int(_about(path).split()[0]) if is_remote(path) else os.path.getsize(path)


def is_remote(path) -> bool:
  """Whether it is one that Beam opens: gs://bucket/…"""
  return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def absolute(path: str) -> str:
  return path if is_remote(path) else os.path.abspath(path)


def opened(path: str):
  return _filesystems().opened(path) if is_remote(path) else open(path, "rb")


def _filesystems():
  from xe_retrieval.preparation.beam import filesystems  # seconds, and an extra of the package

  return filesystems


def folder(path: str, within: tuple[str, ...] = ()):
  """The source of images at a path: Folder, TarFolder or, if it is remote, Beam's."""
  if is_remote(path):
    known = _filesystems()
    return TarFolder(path) if known.Path(path).exists() else known.Folder(path, within)
  return TarFolder(path) if os.path.isfile(path) else Folder(path, within)


def samples(
  path: str, split: str | None, elsewhere: bool = False
) -> Iterator[tuple[Sample, bytes | Rejected] | Rejection]:
  """Streams the images of one tar shard with their captions.

  On a machine `elsewhere`, an OSError is one of that machine, and is raised.
  """
  shard = os.path.basename(path)
  try:
    with opened(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
      for key, parts in _grouped(_parts(tar, file, shard)):
        if isinstance(parts, Rejection):
          yield parts
        else:
          yield _sample(shard, key, parts, split)
  except (OSError, tarfile.TarError, ValueError, EOFError) as e:
    if elsewhere and isinstance(e, OSError):
      raise
    yield Rejection(shard, "", "truncated", f"the rest of the shard cannot be read: {e}"[:200])


def shards(pattern: str) -> list[tuple[str, str | None]]:
  """[split=]name{00000..00331}.tar, {a,b}, * or ? -> [(path, split or None)]."""
  split, pattern = caption_tables.split_and_path("webdataset", pattern)
  paths = [path for name in braceexpand(pattern) for path in _matches(name) or [name]]
  missing = [p for p in paths if not (is_remote(p) and _about(p) != "missing" or os.path.isfile(p))]
  if missing:
    raise ValueError(f"--webdataset: {missing[0]}: there is no such file")
  return [(path, split) for path in paths]


def _matches(pattern):
  if is_remote(pattern):
    return [path for path, _ in _filesystems().found(pattern)]
  return sorted(glob.glob(pattern))


def _parts(tar, file, shard):
  """(key, extension, bytes) of each regular member, or (key, "", Rejection)."""
  for member in tar:
    if member.isdir():
      continue
    folder, _, base = member.name.rpartition("/")
    stem, _, extension = base.partition(".")
    key = f"{folder}/{stem}" if folder else stem

    def rejected(*why, member=member):
      return Rejection(f"{shard}:{caption_tables.printable(member.name)}", "", *why)

    if member.name.startswith("/") or ".." in member.name.split("/"):
      yield key, "", rejected("outside the folder", "an absolute path or .. in the name")
    elif not member.isreg() or member.issparse():
      yield key, "", rejected("missing file", "a link or device, not a file")
    else:
      limit = MAX_BYTES if extension.lower() in _EXTENSIONS else _MAX_TEXT
      file.seek(member.offset_data)
      content = file.read(min(member.size, limit + 1))
      if len(content) < min(member.size, limit + 1):
        raise EOFError(f"unexpected end within {member.name}")
      yield key, extension.lower(), content
    tar.members.clear()  # tarfile would keep all of them in memory


def _grouped(parts):
  """(key, {extension: bytes}) of successive parts with the same key; rejections pass through."""
  current, found = None, {}
  for key, extension, content in parts:
    if isinstance(content, Rejection):
      yield key, content
      continue
    if key != current and found:
      yield current, found
      found = {}
    current = key
    found[extension] = content
  if found:
    yield current, found


def _sample(shard, key, parts, split):
  extension = next((e for e in _EXTENSIONS if e in parts), None)
  file = f"{key}.{extension}" if extension else key
  file = file.encode("utf-8", "backslashreplace").decode()  # may not be UTF-8
  where = f"{shard}:{caption_tables.printable(file)}"
  try:
    caption = caption_tables.clean(_caption(parts))
  except Rejected as e:
    return Rejection(where, caption_tables.printable(file), e.reason, e.detail)
  data = parts[extension] if extension else Rejected("missing file", "no image in the shard")
  return Sample(file, split, [Caption(where, f"{file}#0", caption)]), data


def _caption(parts):
  if len(parts.get("txt", b"")) > _MAX_TEXT or len(parts.get("json", b"")) > _MAX_TEXT:
    raise Rejected("too long", "more than 1 MB of text")
  if "txt" in parts:
    return parts["txt"].decode("utf-8", "surrogateescape")
  try:
    caption = json.loads(parts.get("json", b"{}")).get("caption")
  except (ValueError, AttributeError, RecursionError) as e:
    raise Rejected("unreadable row", "the .json is not a JSON object") from e
  return caption if isinstance(caption, str) else ""
