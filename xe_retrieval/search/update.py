"""Bringing a collection up to date: embed what is new or changed, drop what is gone, swap.

Embedded chunks go to INDEX/partial/<source> at once, so that an interrupted run loses at most one
of them; from there they go to the store, file by file. Several processes embed each its share; then
process 0 does whatever is left, and the swap. What is known of images is in memory as NumPy arrays,
some 60 bytes each; names are not.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import shutil
import sys

import filelock
import jax
import numpy as np
import tqdm

from xe_retrieval import model as models
from xe_retrieval.embed import embedding_loop
from xe_retrieval.search import chunks, generation, image_sources, stores
from xe_retrieval.search.collection import MANIFEST, Collection
from xe_retrieval.search.stores import table_columns
from xe_retrieval.search.stores.table_columns import TableColumns
from xe_retrieval.training import processes

CHUNK = 2048  # images that are embedded before they are safe on disk
_AT_ONCE = 1 << 14  # images that are written again with other columns


@dataclasses.dataclass
class Report:
  images: int
  embedded: int = 0
  removed: int = 0
  skipped: list = dataclasses.field(default_factory=list)  # (source key, name, reason)
  changed: bool = True


def update_index(
  path,
  model,
  workdir,
  add=(),
  remove=(),
  kind="auto",
  rebuild=False,
  precision="",
  columns="",
  store="",
) -> Report:
  """Sources `add` are brought up to date, those of `remove` dropped, the others left alone.

  `precision` and `store` are "" for what they are now, `columns` is a table (table_columns.py).
  """
  path = pathlib.Path(path).expanduser()
  if not (path / MANIFEST).exists():
    image_sources.check_apart(path, add)
  path.mkdir(parents=True, exist_ok=True)
  with _lock(path) if processes.is_primary() else contextlib.nullcontext():
    old = _current(path, rebuild) if (path / MANIFEST).exists() else None
    if old and old.manifest["model"] != model.fingerprint() and not rebuild:
      raise ValueError(
        f"{path} was made with another model; --rebuild embeds all of it anew with this one"
      )
    records = {about["key"]: about for about in old.manifest["sources"]} if old else {}
    sources = {s.key: s for s in (*(old.sources.values() if old else ()), *add)}
    for source in remove:
      if source.key not in records:
        held = ", ".join(records) if old else "nothing"
        raise ValueError(f"{source.key} is not in the index; it holds {held}")
    gone = {source.key for source in remove}
    fresh = [s for key, s in sources.items() if rebuild or key in {a.key for a in add}]
    update = _Update(path, model, old, rebuild, TableColumns(columns) if columns else None)
    if jax.process_count() > 1:
      for source in sorted(fresh, key=lambda s: s.key):
        update.walk(source, records.get(source.key), share=True)
      processes.exchange("index", "")  # all have embedded their share
      if not processes.is_primary():
        return update.report
    options = {"index": kind} | ({"precision": precision} if precision else {})
    update.open_store(store, options)
    kept = {}  # key -> what the manifest says of the source
    for key, source in sources.items():
      if key in gone:
        update.drop(records[key])
      elif source in fresh:
        kept[key] = update.bring(source, records.get(key), _label(source, records, kept))
      else:
        kept[key] = records[key]
        update.report.skipped += generation.read_skipped(old, key)
    report = update.report
    report.images = sum(record["images"] for record in kept.values())
    if not report.images:
      raise ValueError("there would be no images in the index: nothing was changed")
    update.changed |= update.store.stale or bool(
      old and report.images != old.manifest["images"]  # a run was killed before it could say so
    )
    report.changed = update.changed or kept.keys() != records.keys() or not update.is_as_before()
    if report.changed:
      made = model, workdir, update.store, old, {k: sources[k] for k in kept}, kept
      generation.publish(path, *made, update.columns, report.skipped, kind)
    for key in gone | {source.key for source in fresh}:
      for directory in (path / "partial").glob(partial(path, key, "*").name):
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # work of other sources lies there
      (path / "partial").rmdir()
  return report


class _Update:
  """One run: what it embeds lies in files, and goes to the store from there."""

  def __init__(self, path, model, old, rebuild, table):
    self.path, self.model, self.old, self.rebuild, self.table = path, model, old, rebuild, table
    self.report, self.changed, self._added = Report(0), rebuild, np.zeros(0, np.uint64)
    self.columns = {} if rebuild or not old else old.manifest["columns"]
    if table:
      table.agree(self.columns)
      self.columns = self.columns | table.types

  def open_store(self, store, options):
    """The store to write to: the collection's own, or a new one."""
    place = stores.parse(store, self.path) if store or not self.old else None
    if not self.old or self.rebuild:
      place = place or stores.place(self.old.manifest["store"])
      self.about = place | options
      self.store = stores.create(self.path, self.about, self.columns, self.model.scoring.width)
      return
    held = self.old.manifest["store"]
    if place and place != stores.place(held):
      raise ValueError(f"{self.path} keeps its vectors elsewhere; --rebuild moves them to {store}")
    self.about = held | options
    self.store = stores.open(self.path, self.about, self.columns, writing=True)

  def is_as_before(self) -> bool:
    """Whether vectors are still to be kept as they are."""
    before = self.old and self.old.manifest
    return before and before["store"] == self.about and before["columns"] == self.columns

  def drop(self, record):
    ids, _ = self._known(record, rebuild=False)
    self.report.removed += len(ids)
    if not self.rebuild:
      self.store.remove(ids)

  def bring(self, source, record, label) -> dict:
    """Brings one source up to date -> what the manifest says of it."""
    walked = self.walk(source, record)
    self.report.skipped += [(source.key, name, reason) for name, reason in walked.failed]
    held, _ = self._known(record, rebuild=False)
    known, new = walked.known[0], walked.chunks.ids()
    self._check(source, walked, known, new)
    kept = known[walked.kept]
    self.report.embedded += len(new)
    removed = np.count_nonzero(~np.isin(held, kept) & ~np.isin(held, new))
    self.report.removed += removed
    self.changed |= bool(removed or len(new))
    gone = known[~walked.kept]
    self.store.remove(gone[~np.isin(gone, new)])
    for chunk in walked.chunks:
      columns = self._columns(source, label, chunk.ids, chunk.names, chunk.stamps, gone)
      self.store.remove(chunk.ids[np.isin(chunk.ids, gone)])
      self.store.add(chunk.ids, chunk.vectors, columns)
    table = self.table and self.table.fingerprint
    if table and len(kept) and record["table"] != table:
      self._with_columns(source, label, kept)
    return walked.summary(label) | {
      "key": source.key,
      "label": label,
      "images": len(kept) + len(new),
      "table": table or (None if len(new) or not record else record["table"]),
    }

  def walk(self, source, record, share=False):
    """Embeds what is new or changed; with `share`, what of it is this process's."""
    directory = partial(self.path, source.key, self.model.fingerprint()[:16])
    known = self._known(record, self.rebuild)
    embedded = hasattr(source, "chunks")  # elsewhere, see embed.embedded_source
    found = source.chunks() if embedded else chunks.Chunks(directory.glob("*.parquet"))
    walked = chunks.Walk(source, known, found)
    walked.failed += source.skipped() if embedded else []
    with tqdm.tqdm(unit=" images", delay=2, file=sys.stderr) as bar:
      todo = []
      batches = chunks.batches(source.entries(), models.BATCH)
      for number, entries in enumerate(batches):
        bar.update(len(entries))
        new = walked.look(entries)
        # Whole batches for each process: rows of a batch are computed together.
        if not share or number % jax.process_count() == jax.process_index():
          todo += new
        if todo and bar.total is None:
          bar.total = source.count()
        while len(todo) >= CHUNK:
          self._embed(source, todo[:CHUNK], walked, directory)
          todo = todo[CHUNK:]
      if todo:
        self._embed(source, todo, walked, directory)
    return walked

  def _embed(self, source, entries, walked, directory):
    chunk, failed = chunks.embed(self.model, source, entries)
    if failed:
      embedding_loop.check_there(source)  # pictures of a disk that is gone are not broken
    walked.fail(failed)
    if chunk:
      walked.chunks.add(directory, chunk)

  def _known(self, record, rebuild):
    if not record or not self.old or rebuild or self.old.store is None:
      return np.zeros(0, np.uint64), np.zeros((0, 2), np.int64)
    return self.old.store.known(record["label"])

  def _check(self, source, walked, known, new):
    """ValueError if two images have one id."""
    ids = np.sort(np.concatenate(walked.ids or [np.zeros(0, np.uint64)]))
    twice = ids[1:][np.diff(ids) == 0]
    if len(twice):
      of = (e.name for e in source.entries() if chunks.ids_of(source, [e])[0] == twice[0])
      raise ValueError(f"{' and '.join(map(repr, of))} have the same id; rename one of them")
    strange = new[~np.isin(new, known)]
    there = strange[self.store.has(strange)]
    also = strange[np.isin(strange, self._added)]
    self._added = np.concatenate([self._added, new])
    if len(there) or len(also):
      id = (*there, *also)[0]
      name = next(e.name for e in source.entries() if chunks.ids_of(source, [e])[0] == id)
      other = "an image of another source"
      if len(there):
        found = self.store.fetch(there[:1], ("source", "name"))
        other = f"{os.fsdecode(found['name'][0])!r} of {found['source'][0]}"
      raise ValueError(f"{name!r} has the same id as {other}; rename one of them")

  def _with_columns(self, source, label, ids):
    """Writes images again of which the table says something else."""
    for start in range(0, len(ids), _AT_ONCE):
      some = ids[start : start + _AT_ONCE]
      found = self.store.fetch(some, ("name", *self.table.types))
      some = some[self.table.differs(found["name"], found)]
      if not len(some):
        continue
      found = self.store.fetch(some, ("name", "stamp_size", "stamp_time"))
      stamps = np.array([found["stamp_size"], found["stamp_time"]], np.int64).T
      columns = self._columns(source, label, some, found["name"], stamps, some)
      vectors = self.store.vectors(some)
      self.store.remove(some)
      self.store.add(some, vectors, columns)
      self.changed = True

  def _columns(self, source, label, ids, names, stamps, held):
    """What is known of images, as Store.add takes it. Of `held`, which are in the store, stays what
    the table says nothing of."""
    table = self.table.of(names) if self.table else {}
    others = {name: kind for name, kind in self.columns.items() if name not in table}
    own = chunks.columns(source, label, names, stamps)
    return own | table_columns.held(self.store, ids, np.isin(ids, held), others) | table


def _current(path, rebuild):
  """What is there now. To be made anew, it may be that its vectors are lost."""
  try:
    return Collection(path, writing=True)
  except ValueError:
    if not rebuild:
      raise
    return Collection(path, store=False)


def _label(source, records, kept):
  """photos; a second "photos" is "photos (2)". A source keeps what it is called."""
  if source.key in records:
    return records[source.key]["label"]
  taken = {record["label"] for record in (*records.values(), *kept.values())}
  names = (f"{source.label} ({n})" if n > 1 else source.label for n in itertools.count(1))
  return next(name for name in names if name not in taken)


def partial(path, key, model) -> pathlib.Path:
  """Where chunks of a source lie that a model has embedded, until they are in the collection."""
  return (
    path / "partial" / f"{hashlib.blake2b(os.fsencode(key), digest_size=8).hexdigest()}-{model}"
  )


@contextlib.contextmanager
def _lock(path):
  lock = filelock.FileLock(path / ".lock", blocking=False)
  try:
    lock.acquire()
  except filelock.Timeout:
    raise ValueError(f"another run is writing to {path}") from None
  try:
    yield
  finally:
    lock.release()
