"""What workers that were killed, or ran twice, have left in the folder of a part."""

import contextlib
import os
import socket
import sys
import time

from xe_retrieval.data import paths
from xe_retrieval.embed import vector_files

_OLD = 3600  # seconds after which nobody writes to an unfinished file any more


def intact(folder, kind) -> list[vector_files.File]:
  """The chunks of a part that is not done, in order; damaged ones are deleted, and told.

  So are damaged lists of what was skipped.
  """
  if not paths.is_remote(folder):
    folder.mkdir(exist_ok=True)
    paths.sync(folder.parent)
    _delete_unfinished(folder)
  for path in filter(lambda path: vector_files.is_list(path.name), _listed(folder)):
    with contextlib.suppress(FileNotFoundError):
      if vector_files.list_name(path.read_bytes()) != path.name:
        path.unlink()  # else its name would be taken when the list is written anew
  files = []
  for name in sorted(path.name for path in _listed(folder) if vector_files.is_chunk(path.name)):
    try:
      files.append(vector_files.read(folder, name, kind)[0])
    except ValueError as e:
      (folder / name).unlink(missing_ok=True)
      print(e, file=sys.stderr)
  return files


def delete_unlisted(folder, keep) -> None:
  """Deletes chunks and lists that are not among the files of a part that is done."""
  for path in _listed(folder):
    if path.name not in keep and (
      vector_files.is_chunk(path.name) or vector_files.is_list(path.name)
    ):
      path.unlink(missing_ok=True)


def _listed(folder):
  try:
    return list(folder.iterdir())
  except FileNotFoundError:  # in a bucket, a folder without files is not there
    return []


def _delete_unfinished(folder):
  """Deletes those of processes of this machine that have ended, and those that are old."""
  mine = f".{socket.gethostname()}-"
  for path in folder.iterdir():
    if not path.name.endswith(paths.PARTIAL):
      continue
    _, own, process = path.name.removesuffix(paths.PARTIAL).rpartition(mine)
    process = process.partition(".")[0]
    ended = own and process.isdigit() and not os.path.exists(f"/proc/{process}")
    with contextlib.suppress(FileNotFoundError):  # its writer has just finished it
      if ended or time.time() - path.stat().mtime > _OLD:
        path.unlink()
