"""Embeds one part of a source, and goes on with what an interrupted run of it has left.

In memory are 60 bytes for each picture of the part, one chunk, and two batches of pixels.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import sys
import threading

import numpy as np
import tqdm

from xe_retrieval.embed import directory, embedding_loop, leftovers, vector_files

CHUNK = 2048  # pictures in a file; a worker that is killed has embedded at most as many in vain
_AT_ONCE = 16_384  # names that are looked up together


@dataclasses.dataclass(frozen=True)
class Report:
  done: directory.Done
  embedded: int = 0  # now
  fresh: int = 0  # pictures that are new or changed since the part was done
  gone: int = 0

  def __str__(self):
    done = self.done
    text = f"part {done.part}/{done.parts} is done: {done.pictures:,} pictures"
    text += f", {done.skipped:,} files skipped" if done.skipped else ""
    text += f", {self.embedded:,} embedded now" if self.embedded else ""
    if self.fresh or self.gone:
      text += f"; since then {self.fresh:,} are new or changed and {self.gone:,} gone, which "
      text += "the same command with --update takes over"
    return text


def plan_of(model, source, parts: int) -> directory.Plan:
  scoring = model.scoring
  return directory.Plan(
    model.fingerprint(), source.key, parts, scoring.width, scoring.dim, model.step
  )


def run(model, source, out, part: int, parts: int, update: bool = False) -> Report:
  """A pure function of the pictures; what is there of its result is not computed again.

  A part that is done stays as it is, unless `update` and its pictures have changed.
  """
  embedding_loop.check_there(source)
  plan = plan_of(model, source, parts)
  out = directory.claim(out, plan)
  folder = directory.folder(out, part, parts)
  marker = directory.read_marker(out, part, parts)
  try:
    done = directory.read_done(out, plan, part)
    held = [file.rows for file, _ in directory.read_files(out, plan, done)] if done else []
    skipped = directory.read_skipped(out, done) if done else []
    # A folder that could not be listed may be listed now; with a new disk, a bad sector be read.
    tried = [s for s in skipped if not _is_folder(s["name"])]
    tried = [s for s in tried if not update or s["reason"] != os.strerror(errno.EIO)]
    tried = {(s["name"], *s["stamp"]) for s in tried}
  except ValueError as e:
    if marker is None or not directory.withdraw(out, part, parts, marker):
      return run(model, source, out, part, parts, update)
    print(e, file=sys.stderr)
    done = None
  if done:
    known = _Known(held)
    fresh = sum((e.name, *e.stamp) not in tried for e in _unknown(source, part, parts, known))
    gone = 0 if known.unlisted else int((~known.seen).sum())
    report = Report(done, fresh=fresh, gone=gone)
    if not update or not (report.fresh or report.gone):
      return report
    if marker is None or not directory.withdraw(out, part, parts, marker):
      return run(model, source, out, part, parts, update)  # another worker was faster
  return _embed(model, source, out, folder, plan, part)


def _embed(model, source, out, folder, plan, part):
  files = leftovers.intact(folder, vector_files.schema(plan.width))
  known = _Known([file.rows for file in files])
  number = 1 + max((vector_files.number(file.name) for file in files), default=-1)
  skipped, embedded = [], 0
  todo = _unknown(source, part, plan.parts, known)
  with _progress(source, part, plan.parts, len(known.seen)) as bar:
    batches = bar(embedding_loop.embed(model, source, todo))
    for chunk in embedding_loop.chunks(batches, CHUNK):
      if chunk.failed:
        embedding_loop.check_there(source)  # pictures of a disk that is gone are not broken
      skipped += chunk.failed
      if chunk.entries:
        rows = vector_files.rows_of(source.key, chunk.entries)
        content = vector_files.table(rows, chunk.entries, chunk.vectors)
        files.append(vector_files.write(folder, number, content))
        number, embedded = number + 1, embedded + len(rows)
  embedding_loop.check_there(source)
  seen = np.concatenate([known.seen, np.ones(embedded, bool)])
  files = _current(folder, plan, files, seen, number, keep_unseen=known.unlisted)
  done = directory.finish(out, plan, part, files, skipped)
  return Report(done, embedded)


class _Known:
  """Rows that are on disk, to be found by id and stamp; `seen` says which were looked up.

  `unlisted`: a folder could not be listed, so that those not seen may lie there.
  """

  def __init__(self, rows):
    keys = _keys(np.concatenate([np.empty(0, vector_files.ROW), *rows]))
    self._order = np.argsort(keys, kind="stable")  # of equal rows, the first is found
    self._sorted = keys[self._order]
    self.seen = np.zeros(len(keys), bool)
    self.unlisted = False

  def look_up(self, rows) -> np.ndarray:
    """ROW [n] -> bool [n], whether they are known."""
    if not len(self._sorted):
      return np.zeros(len(rows), bool)
    keys = _keys(rows)
    place = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
    found = self._sorted[place] == keys
    self.seen[self._order[place[found]]] = True
    return found


def _keys(rows):  # ROW [n] -> uint64 [n]
  """Ids are hashes already; odd factors spread the stamps over all bits."""
  size, time = (rows[name].astype(np.uint64) for name in ("stamp_size", "stamp_time"))
  with np.errstate(over="ignore"):
    mixed = size * np.uint64(0x9E3779B97F4A7C15) + time * np.uint64(0xC2B2AE3D27D4EB4F)
    return rows["id"] + (mixed ^ (mixed >> np.uint64(29)))


def _unknown(source, part, parts, known):
  """Yields entries of the part that are new or changed."""
  entries = source.entries(lambda name: _wanted(name, part, parts))
  while some := list(itertools.islice(entries, _AT_ONCE)):
    known.unlisted |= any(_is_folder(entry.name) for entry in some)
    found = known.look_up(vector_files.rows_of(source.key, some))
    yield from (some[i] for i in np.flatnonzero(~found))


def _wanted(name, part, parts):
  """A folder that cannot be listed may hold pictures of every part."""
  return _is_folder(name) or directory.part_of(name, parts) == part


def _is_folder(name):
  """Whether an entry is a folder that could not be listed, see image_folder.walk."""
  return name.endswith("/")


def _current(folder, plan, files, seen, number, keep_unseen):
  """Files without the rows of pictures that are gone, have changed, or are there twice.

  `keep_unseen` keeps those that are gone.
  """
  ids = np.concatenate([np.empty(0, np.uint64), *(file.rows["id"] for file in files)])
  rows = np.flatnonzero(seen)
  if keep_unseen:
    rows = np.concatenate([rows, np.flatnonzero(~seen)])  # of each id, those seen come first
  keep = np.zeros(len(ids), bool)
  keep[rows[np.unique(ids[rows], return_index=True)[1]]] = True
  out, start = [], 0
  for file in files:
    kept = keep[start : start + len(file.rows)]
    start += len(file.rows)
    if kept.all():
      out.append(file)
    elif kept.any():
      _, content = vector_files.read(folder, file.name, vector_files.schema(plan.width), file.crc)
      out.append(vector_files.write(folder, number, content.filter(kept)))
      number += 1
  return out


@contextlib.contextmanager
def _progress(source, part, parts, known):
  """Gives a function by which batches pass a progress bar; its end is counted meanwhile."""
  stop = threading.Event()
  about = f"part {part}/{parts}"
  with tqdm.tqdm(desc=about, unit=" pictures", delay=2, file=sys.stderr) as bar:

    def count():
      with contextlib.suppress(OSError, ValueError):  # the walk that embeds says so
        bar.total = max(source.count(wanted) - known, bar.n)

    def wanted(name):
      if stop.is_set():
        raise ValueError("no longer needed")
      return _wanted(name, part, parts)

    def watch(batches):
      for batch in batches:
        bar.update(len(batch.entries) + len(batch.failed))
        yield batch

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
      yield watch
    finally:
      stop.set()
      counting.join(timeout=5)
