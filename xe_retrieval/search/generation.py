"""Makes a new generation of a collection beside the current one, then swaps them."""

import functools
import hashlib
import os
import pathlib
import shutil
import sys

import numpy as np
import tqdm

from xe_retrieval import model as models
from xe_retrieval.calibration import artifact
from xe_retrieval.search import chunks, index_audit, stores
from xe_retrieval.search.collection import FORMAT, Strings, write_manifest
from xe_retrieval.search.stores import segments

QUERIES = 500  # that an index is audited with, and as many others that it is tuned by
_AT_ONCE = 64 * models.BATCH  # captions
_CAPTION_FILES = ("captions.bin", "captions.npy", "caption_vectors.npy")


def publish(path, model, workdir, store, old, sources, records, columns, skipped, kind) -> dict:
  """Whatever the store was given becomes the current generation; -> its manifest.

  `sources` and `records` are {key: image source} and {key: what the manifest says of it}.
  """
  before = old.manifest if old else {"store": {}}
  taken = (p.name[1:] for p in path.glob("g[0-9]*"))
  number = 1 + max((int(x) for x in taken if x.isdecimal()), default=0)
  out = path / f"g{number:06d}"
  out.mkdir()
  fingerprint, calibration = model.fingerprint(), artifact.read(workdir, model.fingerprint())
  about = _captions(out, model, [s for s in sources.values() if s.has_captions], old)
  if calibration:
    calibration.write(out)
  lines = ["\t".join(map(escaped, line)) + "\n" for line in skipped]
  (out / "skipped.tsv").write_text("".join(lines), errors="surrogateescape")

  ask = functools.cache(lambda: _queries(out, model, calibration))
  kept = store.commit(lambda: None if ask() is None else ask()[0][::2])
  images = sum(record["images"] for record in records.values())
  segments.sync_tree(out)
  segments.sync(path)
  manifest = {
    "format": FORMAT,
    "generation": out.name,
    "model": fingerprint,
    "workdir": str(pathlib.Path(workdir).expanduser().resolve()),
    "step": model.step,
    "sources": list(records.values()),
    "images": images,
    **about,
    "skipped": len(skipped),
    "kind": kind,
    "store": kept,
    "columns": columns,
    "summary": summary(records.values()),
    "audit": _audit(path, kept, columns, ask, before, images),
  }
  write_manifest(path, manifest)
  store.swept(before["store"])
  # The previous one stays for those who are opening it.
  for generation in segments.numbered(path, "g", _CAPTION_FILES):
    if generation.name not in (out.name, before.get("generation")):
      shutil.rmtree(generation, ignore_errors=True)
  return manifest


def _captions(out, model, sources, old) -> dict:
  """The distinct captions of all sources, embedded, or those of the generation before."""
  hashes = [
    _hashes(some) for source in sources for some in chunks.batches(source.captions(), _AT_ONCE)
  ]
  hashes = np.concatenate([np.zeros(0, np.uint64), *hashes])
  firsts = np.zeros(len(hashes), bool)
  firsts[np.unique(hashes, return_index=True)[1]] = True
  digest = hashlib.blake2b(hashes[firsts].tobytes(), digest_size=16).hexdigest()
  about = {"captions": int(firsts.sum()), "caption_hash": f"{digest}-{model.fingerprint()[:16]}"}
  if old and old.manifest["caption_hash"] == about["caption_hash"]:
    for name in _CAPTION_FILES:
      _link(old.directory / name, out / name)
    return about
  shape = (about["captions"], model.scoring.width)
  if not shape[0]:
    np.save(out / "caption_vectors.npy", np.zeros(shape, np.float32), allow_pickle=False)
    Strings.write(out, "captions", [])
    return about
  vectors = np.lib.format.open_memmap(out / "caption_vectors.npy", "w+", np.float32, shape)

  def embedded():
    done = seen = 0
    with tqdm.tqdm(total=len(vectors), unit=" captions", delay=2, file=sys.stderr) as bar:
      for some in (
        some for source in sources for some in chunks.batches(source.captions(), _AT_ONCE)
      ):
        new = [c for c, first in zip(some, firsts[seen : seen + len(some)], strict=True) if first]
        seen += len(some)
        if new:
          vectors[done : done + len(new)] = model.scoring.text(*model.embed_queries(new))
          done += len(new)
          bar.update(len(new))
          yield new

  Strings.write(out, "captions", embedded())
  vectors.flush()
  return about


def _hashes(captions):
  digests = (hashlib.blake2b(os.fsencode(c), digest_size=8).digest() for c in captions)
  return np.frombuffer(b"".join(digests), np.uint64)


def _link(source, target):
  try:
    os.link(source, target)
  except OSError:  # a file system without hard links
    shutil.copyfile(source, target)


def _queries(out, model, calibration):
  """Vectors of texts that are like what will be asked, and what they are; None: none is known.

  Of 2 × QUERIES, an index is tuned by every other one, and audited with the others.
  """
  vectors = np.load(out / "caption_vectors.npy", mmap_mode="r", allow_pickle=False)
  if len(vectors) >= 2:
    at = np.unique(np.linspace(0, len(vectors) - 1, 2 * QUERIES).astype(np.int64))
    return np.asarray(vectors[at]), "captions of the collection"
  if calibration and calibration.bank and len(calibration.bank.captions) >= 2:
    texts = calibration.bank.captions
    texts = [texts[i] for i in np.unique(np.linspace(0, len(texts) - 1, 2 * QUERIES).astype(int))]
    return model.scoring.text(*model.embed_queries(texts)), "training captions"
  return None


def _audit(path, kept, columns, ask, before, images):
  """Of the index as it will be served; as before where it has only grown by a few images, which
  are compared with exactly."""
  store = stores.open(path, kept, columns)
  if not store.approximate:
    return index_audit.EXACT
  known = before.get("audit")
  hashed = [[s["name"], s.get("removed")] for s in kept.get("segments", ()) if s["ann"]]
  if known and hashed and known.get("of") == hashed and images <= 1.1 * known["images"]:
    return known
  asked = ask()
  found = asked and index_audit.served(store, asked[0][1::2], asked[1])
  return found and found | {"of": hashed, "images": images}


def summary(records) -> dict:
  """Folders with the number of images in and under each, and the first and last date."""
  folders = [folder for record in records for folder in record["folders"]]
  dates = [date for record in records for date in record["dates"]]
  return {"folders": chunks.listed(folders), "dates": [min(dates), max(dates)] if dates else None}


_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def escaped(text: str) -> str:
  """As one field of a TSV."""
  return text.translate(_ESCAPES)


def unescaped(text: str) -> str:
  parts = text.split("\\\\")
  for escape, character in (("\\t", "\t"), ("\\n", "\n"), ("\\r", "\r")):
    parts = [part.replace(escape, character) for part in parts]
  return "\\".join(parts)


def read_skipped(old, key: str) -> list[tuple[str, str, str]]:
  """What could not be read of a source when it was last looked at."""
  with open(old.directory / "skipped.tsv", errors="surrogateescape", newline="\n") as file:
    lines = (tuple(map(unescaped, line[:-1].split("\t", 2))) for line in file)
    return [line for line in lines if line[0] == key]
