"""Paths that a user gives: on a local disk, or in a bucket (gs://…) where that is possible."""

import re

from etils import epath

SCHEMES = ("gs", "s3")  # of which epath, TensorStore and TensorFlow know how to read and write


def is_remote(path) -> bool:
  return re.match(r"[a-z][a-z0-9+.-]+://", str(path)) is not None


def absolute(path) -> epath.Path:
  """The path itself if it is remote: `resolve` would make it /current/directory/gs:/….

  ValueError for a scheme that nobody here can write to.
  """
  scheme = str(path).partition("://")[0]
  if is_remote(path):
    if scheme not in SCHEMES:
      known = ", ".join(f"{s}://" for s in SCHEMES)
      raise ValueError(f"{path}: {scheme}:// is unknown; use a local path or {known}")
    return epath.Path(path)
  return epath.Path(path).expanduser().resolve()


def local(path, what: str) -> epath.Path:
  """The path; ValueError if it is remote, where `what` needs a disk."""
  if is_remote(path):
    raise ValueError(f"{path}: {what} needs a local directory, or a bucket that is mounted as one")
  return epath.Path(path).expanduser()
