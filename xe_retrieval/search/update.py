"""Bringing a collection up to date: embed what is new or changed, drop what is gone, swap.

Embedded chunks go to INDEX/partial at once, so that an interrupted run loses at most one of them.
Several processes embed each its share; then process 0 does whatever is left, and the swap.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys
import time

import filelock
import jax
import numpy as np
import tqdm

from xe_retrieval import model as models
from xe_retrieval.calibration import artifact
from xe_retrieval.data import decoding
from xe_retrieval.preparation import cores
from xe_retrieval.search.stores import scann_index
from xe_retrieval.search.collection import (
  EXACT_BELOW,
  FORMAT,
  MANIFEST,
  Collection,
  Strings,
  read_manifest,
  write_json,
)
from xe_retrieval.training import processes

CHUNK = 2048  # images that are embedded before they are safe on disk


@dataclasses.dataclass
class Report:
  images: int
  embedded: int = 0
  removed: int = 0
  skipped: list = dataclasses.field(default_factory=list)  # (source key, name, reason)
  changed: bool = True


def update_index(path, model, workdir, add=(), remove=(), kind="auto", rebuild=False) -> Report:
  """Sources `add` are brought up to date, those of `remove` dropped, the others left alone."""
  path = pathlib.Path(path).expanduser()
  path.mkdir(parents=True, exist_ok=True)
  with _lock(path) if processes.is_primary() else contextlib.nullcontext():
    old = Collection(path) if (path / MANIFEST).exists() else None
    fingerprint = model.fingerprint()
    if old and old.manifest["model"] != fingerprint and not rebuild:
      raise ValueError(
        f"{path} was made with another model; --rebuild embeds all of it anew with this one"
      )
    report = Report(0)
    wanted = {s.key: s for s in (*(old.sources if old else ()), *add)}
    for source in remove:
      if wanted.pop(source.key, None) is None:
        held = ", ".join(old.manifest["sources"]) if old else "nothing"
        raise ValueError(f"{source.key} is not in the index; it holds {held}")
    fresh = set(wanted) if rebuild else {s.key for s in add}
    reusable = None if rebuild or not old else old
    rows = []  # (key, name, stamp, array, row in it)
    if jax.process_count() > 1:
      embedded = _Embedded(path / "partial", fingerprint, reusable)
      for key in sorted(fresh):
        _embed(model, wanted[key], _own_share(_todo(wanted[key], embedded)), embedded)
      processes.exchange("index", "")  # all have embedded their share
      if not processes.is_primary():
        return report
    embedded = _Embedded(path / "partial", fingerprint, reusable)
    for key, source in wanted.items():
      known = embedded.of(key)
      if key not in fresh:
        rows += [(key, name, *place) for name, place in known.items()]
        report.skipped += _skipped(old, key)
        continue
      todo = _todo(source, embedded)
      entries = [entry for entry, _ in todo]
      failed = _embed(model, source, [entry for entry, new in todo if new], embedded)
      report.skipped += [(key, name, reason) for name, reason in failed]
      bad, known = {name for name, _ in failed}, embedded.of(key)
      found = [(key, e.name, *known[e.name]) for e in entries if e.name not in bad]
      report.embedded += sum(reusable is None or array > 0 for *_, array, _ in found)
      rows += found
    if old:
      kept = {row[:2] for row in rows}
      mine = (old.manifest["sources"][s] for s in old.source_of)
      report.removed = sum((k, n) not in kept for k, n in zip(mine, old.names, strict=True))
    report.images = len(rows)
    same = old and not rebuild and not report.embedded and not report.removed
    if same and set(wanted) == set(old.manifest["sources"]) and old.manifest["kind"] == kind:
      report.changed = False
      return report
    if not rows:
      raise ValueError("there would be no images in the index: nothing was changed")
    _write(path, model, fingerprint, workdir, wanted, rows, embedded, report, reusable, kind)
  return report


class _Embedded:
  """Vectors that are known already: of the current generation, and of an interrupted run."""

  def __init__(self, directory, fingerprint, old):
    self.directory, self.fingerprint = directory, fingerprint
    self.vectors = [old.vectors] if old else []
    self._known = collections.defaultdict(dict)  # key -> name -> (stamp, array, row)
    if old:
      keys, stamps = old.manifest["sources"], np.asarray(old.stamps).tolist()
      for row, (source, name) in enumerate(zip(old.source_of.tolist(), old.names, strict=True)):
        self._known[keys[source]][name] = (tuple(stamps[row]), 0, row)
    for path in sorted(directory.glob("*.json")):
      about = json.loads(path.read_text())
      if about["model"] == fingerprint:
        self._take(about, np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False))

  def of(self, key):
    """{name: (stamp, array, row)} of a source."""
    return self._known[key]

  def add(self, key, entries, vectors):
    """[n], [n, width]: on disk when this returns."""
    self.directory.mkdir(exist_ok=True)
    path = self.directory / f"{time.time_ns():020d}-{jax.process_index():04d}"
    np.save(path.with_suffix(".npy"), vectors, allow_pickle=False)
    about = {"model": self.fingerprint, "source": key, "entries": entries}
    write_json(path.with_suffix(".json"), about)
    self._take(about, np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False))

  def _take(self, about, vectors):
    array = len(self.vectors)
    self.vectors.append(vectors)
    for row, (name, stamp) in enumerate(about["entries"]):
      self._known[about["source"]][name] = (tuple(stamp), array, row)

  def gather(self, places, out):
    """[(array, row)] -> out [n, width]."""
    array, row = np.array(places, np.int64).reshape(-1, 2).T
    for a in np.unique(array):
      at = array == a
      out[at] = self.vectors[a][row[at]]


def _todo(source, embedded):
  """[(entry, whether it is new or changed)] of a source."""
  known = embedded.of(source.key)
  return [(e, known.get(e.name, (None,))[0] != e.stamp) for e in source.entries()]


def _own_share(todo):
  """This process's new entries, in whole batches: rows of a batch are computed together."""
  batches = [todo[i : i + models.BATCH] for i in range(0, len(todo), models.BATCH)]
  return [entry for batch in processes.share(batches) for entry, new in batch if new]


def _embed(model, source, todo, embedded):
  """Embeds entries chunk by chunk; returns [(name, reason)] of those that are no pictures."""
  failed = []
  view = decoding.View.of(model.config.image)
  with (
    concurrent.futures.ThreadPoolExecutor(cores.available()) as pool,
    tqdm.tqdm(total=len(todo), unit=" images", delay=2, file=sys.stderr) as bar,
  ):

    def read(entry):
      try:
        return decoding.square(source.read(entry.name), view=view)
      except (OSError, ValueError) as e:
        return str(e)

    for start in range(0, len(todo), CHUNK):
      chunk, good = todo[start : start + CHUNK], []

      def squares(chunk=chunk, good=good):
        for i in range(0, len(chunk), models.BATCH):
          part = chunk[i : i + models.BATCH]
          found = list(zip(part, pool.map(read, part), strict=True))
          failed.extend((e.name, _reason(s)) for e, s in found if isinstance(s, str))
          fine = [(e, s) for e, s in found if not isinstance(s, str)]
          good.extend(e for e, _ in fine)
          bar.update(len(part))
          if fine:
            yield np.stack([s for _, s in fine])

      vectors = model.embed_squares(squares(), len(chunk))
      if good:
        embedded.add(source.key, good, model.scoring.image(vectors))
  return failed


def _reason(error):
  """Strips the location prefix from an error message, so that it fits one field of a TSV."""
  return error.removeprefix("images[0] is ").replace("\t", " ").replace("\n", " ")


def _write(path, model, fingerprint, workdir, wanted, rows, embedded, report, old, kind):
  """A new generation beside the current one, then the swap."""
  number = 1 + max((int(p.name[1:]) for p in path.glob("g[0-9]*")), default=0)
  out = path / f"g{number:06d}"
  out.mkdir()
  keys, shape = list(wanted), (len(rows), model.scoring.width)
  vectors = np.lib.format.open_memmap(out / "vectors.npy", "w+", np.float32, shape)
  for i in range(0, len(rows), 65_536):
    embedded.gather([row[3:] for row in rows[i : i + 65_536]], vectors[i : i + 65_536])
  vectors.flush()

  def save(name, array):
    np.save(out / f"{name}.npy", array, allow_pickle=False)

  ids = np.array([_id(key, name) for key, name, *_ in rows], np.uint64)
  order = np.argsort(ids)
  if (np.diff(ids[order]) == 0).any():
    raise ValueError("two images have the same id; rename one of them")
  save("ids", ids)
  save("order", order)
  number_of = {key: i for i, key in enumerate(keys)}
  save("sources", np.array([number_of[row[0]] for row in rows], np.uint16))
  save("stamps", np.array([row[2] for row in rows], np.int64))
  Strings.write(out, "names", (row[1] for row in rows))

  captions = [c for s in wanted.values() if s.has_captions for c in s.captions()]
  captions = list(dict.fromkeys(captions))
  if old and list(old.captions) == captions:
    caption_vectors = np.asarray(old.caption_vectors)
  else:
    caption_vectors = model.scoring.text(
      *model.embed_queries(captions, len(captions) > models.BATCH)
    )
  Strings.write(out, "captions", captions)
  save("caption_vectors", caption_vectors)

  if kind == "scann" or (kind == "auto" and len(rows) >= EXACT_BELOW):
    print(f"building an index of {len(rows):,} vectors", file=sys.stderr)
    asked = caption_vectors if len(captions) >= 100 else None
    built = scann_index.build(vectors, queries=asked, stored=False)
    built.save(out / "ann")
  listed = [f"{key}\t{name}\t{reason}\n" for key, name, reason in report.skipped]
  (out / "skipped.tsv").write_text("".join(listed), errors="surrogateescape")
  if calibration := artifact.read(workdir, fingerprint):
    calibration.write(out)
  manifest = {
    "format": FORMAT,
    "generation": out.name,
    "model": fingerprint,
    "workdir": str(pathlib.Path(workdir).expanduser().resolve()),
    "step": model.step,
    "sources": keys,
    "images": len(rows),
    "captions": len(captions),
    "skipped": len(report.skipped),
    "kind": kind,
  }
  previous = read_manifest(path)["generation"] if (path / MANIFEST).exists() else None
  write_json(path / MANIFEST, manifest)
  shutil.rmtree(path / "partial", ignore_errors=True)
  for generation in path.glob("g[0-9]*"):  # the previous one stays for those who are opening it
    if generation.name not in (out.name, previous):
      shutil.rmtree(generation, ignore_errors=True)


def _id(key, name):
  digest = hashlib.blake2b(os.fsencode(f"{key}\0{name}"), digest_size=8)
  return int.from_bytes(digest.digest())


def _skipped(old, key):
  lines = (old.directory / "skipped.tsv").read_text(errors="surrogateescape").splitlines()
  return [parts for line in lines if (parts := tuple(line.split("\t", 2)))[0] == key]


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
