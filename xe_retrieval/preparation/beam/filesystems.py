"""Files on any filesystem that Beam knows: local ones, gs://, s3://, hdfs://, …"""

import contextlib
import os
import pathlib
import posixpath
import shutil
import uuid

from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from xe_retrieval.preparation import archives
from xe_retrieval.preparation.image_files import MAX_BYTES
from xe_retrieval.preparation.rejections import Rejected

_PLAIN = {"compression_type": CompressionTypes.UNCOMPRESSED}  # else .gz would be unpacked
_OBJECTS = ("gs://", "s3://", "azfs://")  # an object appears when it is complete


class Path:
  """The part of pathlib.Path that preparing needs."""

  def __init__(self, path):
    self._path = str(path)

  def __truediv__(self, name) -> "Path":
    return Path(f"{self._path.rstrip('/')}/{name}")

  def __str__(self):
    return self._path

  def exists(self) -> bool:
    return FileSystems.exists(self._path)

  def read_bytes(self) -> bytes:
    with opened(self._path) as file:
      return file.read()

  def read_text(self) -> str:
    return self.read_bytes().decode()

  def write_text(self, text: str) -> None:
    """Writes a file whole or not at all."""
    with self._new() as file:
      file.write(text.encode("utf-8", "backslashreplace"))

  def adopt(self, path) -> None:
    """Moves a local file here, whole or not at all."""
    if archives.is_remote(self._path):
      with open(path, "rb") as source, self._new() as file:
        shutil.copyfileobj(source, file, 1 << 20)
    else:
      os.replace(path, self._path)

  def copy(self, target: "Path") -> None:
    FileSystems.copy([self._path], [str(target)])

  def names(self, pattern: str) -> list[str]:
    """Names of the files in this directory that match."""
    if not archives.is_remote(self._path):
      return [path.name for path in pathlib.Path(self._path).glob(pattern)]
    return [posixpath.basename(path) for path, _ in found(str(self / pattern))]

  def mkdir(self) -> None:
    if not archives.is_remote(self._path):
      os.makedirs(self._path, exist_ok=True)

  def unlink(self) -> None:
    """Deletes the file, if there is one."""
    with contextlib.suppress(BeamIOError, OSError):
      FileSystems.delete([self._path])

  def rmtree(self) -> None:
    """Deletes the directory, if there is one."""
    if not archives.is_remote(self._path):
      shutil.rmtree(self._path, ignore_errors=True)
    elif self._path.startswith(_OBJECTS):
      FileSystems.delete([path for path, _ in found(f"{self._path}/**")])
    elif self.exists():
      FileSystems.delete([self._path])

  @contextlib.contextmanager
  def _new(self):
    if self._path.startswith(_OBJECTS):
      with FileSystems.create(self._path, **_PLAIN) as file:
        yield file
      return
    unfinished = f"{self._path}.{uuid.uuid4().hex}.tmp"
    with FileSystems.create(unfinished, **_PLAIN) as file:
      yield file
    if archives.is_remote(self._path):  # hdfs:// does not rename over a file
      self.unlink()
    FileSystems.rename([unfinished], [self._path])


class Folder:
  """Files under a remote directory, by relative name; archives.Folder for any filesystem."""

  def __init__(self, root: str, within: tuple[str, ...] = ()):
    self.root, self.within = root.rstrip("/"), within
    skip = len(self.root) + 1
    self.files = {path[skip:]: about for path, about in found(f"{self.root}/**")}
    if not self.files:
      raise ValueError(f"--images={root}: there is no such folder or tar file")

  def part(self, names: list[str]) -> "Folder":
    """Only these files: less to send to a worker."""
    out = Folder.__new__(Folder)
    places = {self._place(name) for name in names}
    files = {place: self.files[place] for place in places if place in self.files}
    out.__dict__ = {"root": self.root, "within": self.within, "files": files}
    return out

  def stamp(self, names: list[str]) -> str:
    return archives.digest((name, self.files.get(self._place(name), "missing")) for name in names)

  def _place(self, name):
    places = [posixpath.normpath(posixpath.join(folder, name)) for folder in ("", *self.within)]
    return next((place for place in places if place in self.files), places[0])

  def read(self, name: str) -> bytes:
    place = self._place(name)
    if place.startswith(("/", "../")) or place in ("..", "."):
      raise Rejected("outside the folder", f"points to {place[:200]!r}")
    if place not in self.files:
      raise Rejected("missing file", "No such file or directory")
    try:
      with opened(f"{self.root}/{place}") as file:
        return file.read(MAX_BYTES + 1)
    except FileNotFoundError as e:  # deleted since it was listed
      raise Rejected("missing file", "No such file or directory") from e


def opened(path: str):
  """The file, for reading and seeking."""
  return FileSystems.open(path, **_PLAIN)


def found(pattern: str) -> list[tuple[str, str]]:
  """(path, size and time of change) of the files that match, by path; ** matches / as well."""
  try:
    files = FileSystems.match([pattern])[0].metadata_list
  except (BeamIOError, ValueError) as e:
    cause = next(iter((getattr(e, "exception_details", None) or {}).values()), e)
    raise ValueError(f"{pattern}: {' '.join(str(cause).split())[:300]}") from e
  return sorted((f.path, f"{f.size_in_bytes} {f.last_updated_in_seconds}") for f in files)


def fetched(path: str, directory: str) -> str:
  """The path, or that of a local copy with the same name in a new folder of `directory`."""
  if not archives.is_remote(path):
    return path
  if not found(path):
    raise ValueError(f"{path}: there is no such file")
  copy = os.path.join(directory, uuid.uuid4().hex, posixpath.basename(path))
  os.makedirs(os.path.dirname(copy))
  with opened(path) as source, open(copy, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
  return copy
