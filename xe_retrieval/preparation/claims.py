"""Who prepares a data set, and from what: one run at a time, never mixed with another plan."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import time

import filelock

from xe_retrieval.preparation import records


@contextlib.contextmanager
def alone(work: pathlib.Path, name: str):
  """Holds the lock of a data set's unfinished work; ValueError that says who has it.

  The system releases the lock of a process that dies.
  """
  work.parent.mkdir(parents=True, exist_ok=True)
  lock = filelock.FileLock(f"{work}.lock")
  holder = pathlib.Path(f"{work}.holder")
  try:
    lock.acquire(blocking=False)
  except filelock.Timeout as error:
    raise ValueError(
      f"{name} is being prepared by {_read(holder)}; wait for it, or choose another --name or --out"
    ) from error
  try:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    records.replace(holder, f"process {os.getpid()} on {socket.gethostname()} since {since}")
    yield
  finally:
    holder.unlink(missing_ok=True)
    pathlib.Path(lock.lock_file).unlink(missing_ok=True)  # a second run may only lock a new file
    lock.release()
    with contextlib.suppress(OSError):  # not empty: other work
      work.parent.rmdir()


def _read(holder):
  try:
    return holder.read_text()
  except OSError:  # it has just begun or ended
    return "another process"


def claim(work: pathlib.Path, plan: dict) -> None:
  """Keeps finished units of the same plan; ValueError if there are some of another."""
  path = work / "plan.json"
  begun = any(work.glob("[0-9]*.json"))
  if path.exists() and conflicts(work, json.loads(path.read_text()), plan, begun):
    shutil.rmtree(work)
  work.mkdir(parents=True, exist_ok=True)
  records.replace(path, json.dumps(plan))


def conflicts(work, old: dict, new: dict, begun: bool) -> bool:
  """Whether unfinished work has another plan; ValueError if units of it are finished."""
  changed = differences(old, new)
  if changed and begun:
    raise ValueError(
      f"{work} holds unfinished work that was begun with other input or options "
      f"({'; '.join(changed)}); finish it with the former command, or remove it to start over"
    )
  return bool(changed)


def differences(old: dict, new: dict) -> list[str]:
  """What a plan changes, in words; the stamp of images only where both have one."""
  before, after = (dict(plan["made from"]) for plan in (old, new))
  stamps = before.pop("stamp", None), after.pop("stamp", None)
  changed = []
  if before != after:
    changed.append("other files")
  elif None not in stamps and stamps[0] != stamps[1]:
    changed.append("the images have changed since")
  options = sorted((old.keys() | new.keys()) - {"made from", "name"})
  changed += [f"{o}: {old.get(o)} → {new.get(o)}" for o in options if old.get(o) != new.get(o)]
  return changed
