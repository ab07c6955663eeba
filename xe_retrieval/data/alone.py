"""One process at a time, among runs that find each other's files."""

import contextlib
import fcntl

from etils import epath


@contextlib.contextmanager
def alone(path: epath.Path):
  """While this lasts, no other process on this machine makes `path`: look again if it is there."""
  lock = path.parent / f"{path.name}.lock"
  lock.parent.mkdir(parents=True, exist_ok=True)
  with lock.open("w") as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f"another run makes {path.name}; waiting for it", flush=True)
      fcntl.flock(f, fcntl.LOCK_EX)
    yield
    lock.unlink(missing_ok=True)  # whoever waits for it finds the work done
