"""Paths that a user gives: on a local disk, or in a bucket (gs://…) where that is possible."""

import contextlib
import errno
import importlib.util
import os
import re
import socket
import threading

import fsspec
from etils import epath

SCHEME = "gs"  # Orbax takes others for local paths
# Through gcsfs and not through TensorFlow, which has credentials and endpoints of its own.
os.environ.setdefault("EPATH_USE_TF", "0")
# TensorStore writes to the same bucket: a cached listing would not have its files.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def is_remote(path) -> bool:
  return re.match(r"[a-z][a-z0-9+.-]+://", str(path)) is not None


def given(path) -> epath.Path:
  """The path; ValueError for a scheme that nobody here can write to."""
  if is_remote(path):
    scheme = str(path).partition("://")[0]
    if scheme != SCHEME:
      raise ValueError(f"{path}: {scheme}:// is unknown; use a local path or {SCHEME}://…")
    if not importlib.util.find_spec("gcsfs"):
      raise ValueError(f"{path} needs a package: pip install -c constraints.txt -e '.[gcs]'")
  return epath.Path(path).expanduser()


def absolute(path) -> epath.Path:
  """As `given`; of a remote path, `resolve` would make /current/directory/gs:/…."""
  path = given(path)
  return path if is_remote(path) else path.resolve()


def local(path, what: str) -> epath.Path:
  """The path; ValueError if it is remote, where `what` needs a disk."""
  if is_remote(path):
    raise ValueError(f"{path}: {what} needs a local directory, or a bucket that is mounted as one")
  return epath.Path(path).expanduser()


def write(path, content: str | bytes) -> None:
  """Writes a file whole or not at all; an object of a bucket always is."""
  path = epath.Path(path)
  content = content.encode() if isinstance(content, str) else content
  if is_remote(path):
    path.write_bytes(content)
    return
  part = path.with_name(f"{path.name}.part")
  part.write_bytes(content)
  part.replace(path)


def create(path, content: bytes) -> bool:
  """Writes a file whole and durably, unless there is one of that name: then False.

  Of several processes that try at the same time, on any machine, one succeeds.
  """
  path = epath.Path(path)
  if is_remote(path):
    try:
      fsspec.filesystem(SCHEME).pipe_file(str(path), content, mode="create")
    except FileExistsError:
      return False
    return True
  part = own_part(path)
  try:
    with open(part, "wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    try:
      os.link(part, path)
    except FileExistsError:
      return False
    except OSError as e:
      if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
        raise
      if path.exists():  # a file system without hard links
        return False
      os.replace(part, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(part)
  sync(path.parent)
  return True


PARTIAL = ".tmp"  # how names of files end that `create` has not finished


def own_part(path) -> epath.Path:
  """A name beside `path` that no other writer takes."""
  writer = f"{socket.gethostname()}-{os.getpid()}.{threading.get_ident()}"
  return path.with_name(f".{path.name}.{writer}{PARTIAL}")


def sync(path) -> None:
  """Until this returns, a power failure may undo what was written to a file or directory."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def move(source, target) -> None:
  """Renames a directory, with the one above it made; in a bucket, object by object."""
  if is_remote(source):
    fsspec.filesystem(SCHEME).mv(str(source), str(target), recursive=True)
    return
  target.parent.mkdir(exist_ok=True)
  source.rename(target)
