"""A file lock, so that concurrent runs on one machine create a file only once."""

import contextlib
import os

import filelock
from etils import epath


@contextlib.contextmanager
def creating(path: epath.Path):
  """Holds a file lock for creating `path`; check inside whether another process has created it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lock = filelock.FileLock(path.parent / f"{path.name}.lock")
  try:
    lock.acquire(blocking=False)
  except filelock.Timeout:
    print(f"another run makes {path.name}; waiting for it", flush=True)
    lock.acquire()
  try:
    yield
    os.unlink(lock.lock_file)  # safe: the next holder finds `path` created
  finally:
    lock.release()
