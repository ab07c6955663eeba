"""Synthetic vectors as a collection on disk: `python -m benchmarks.index --only=disk`."""

import multiprocessing
import os
import pathlib
import tempfile
import threading
import time

import numpy as np
import pyarrow as pa

WIDTH, K, TILE = 128, 10, 100_000
QUERIES, APPENDED = 1_000, 10_000


def measure(count, precision, kind, folder=None):
  """Prints the figures of one size. A process of its own: memory is counted from its start."""
  context = multiprocessing.get_context("spawn")
  process = context.Process(target=_measure, args=(count, precision, kind, folder))
  process.start()
  process.join()
  if process.exitcode:
    raise SystemExit(f"{count:,} vectors: the process ended with {process.exitcode}")


def _measure(count, precision, kind, folder):
  from xe_retrieval.search import index_audit, stores
  from xe_retrieval.search.stores import scann_index

  scann_index._scann()  # libraries are not the index's memory
  with tempfile.TemporaryDirectory(dir=folder) as directory:
    path, (sample, queries) = pathlib.Path(directory), np.split(draw(2 * QUERIES, seed=1), 2)
    about = {"kind": "files", "index": kind, "precision": precision}
    store, drawing = stores.create(path, about, {}, WIDTH), 0.0
    with Memory() as build:
      start = time.perf_counter()
      for first in range(0, count, TILE):
        began = time.perf_counter()
        vectors = draw(min(TILE, count - first), seed=(2, first))
        drawing += time.perf_counter() - began
        store.add(*rows(first, vectors))
      added = time.perf_counter() - start - drawing
      about = store.commit(lambda: sample)
      seconds = time.perf_counter() - start - drawing
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with Memory() as searching:
      start = time.perf_counter()
      store = stores.open(path, about, {})
      opened = time.perf_counter() - start
      one, several, found = ask(store, queries)
    exact, _ = store.nearest(queries, K, exact=True)
    recall = scann_index.overlap(found, exact)
    built, _ = index_audit.described(store)
    with Memory() as appending:
      start = time.perf_counter()
      again = stores.open(path, about, {}, writing=True)
      again.add(*rows(count, draw(APPENDED, seed=3)))
      after = again.commit(lambda: sample)
      append = time.perf_counter() - start
    assert len(stores.open(path, after, {}, writing=True)) == count + APPENDED
  print(f"{count:,} × {WIDTH} in {precision}: {built}")
  print(f"  built in {seconds:,.1f} s ({added:,.1f} s of them written), {build}")
  print(f"  on disk {size / 1e9:.2f} GB, {size / count:,.0f} bytes an image")
  print(f"  opened in {opened:.2f} s; recall@10 {recall:.4f} of {len(queries):,} queries")
  print(
    f"  p95 {1e3 * np.quantile(one, 0.95):.2f} ms, median {1e3 * np.median(one):.2f} ms;", end=""
  )
  print(f" {several:,.0f} queries/s in batches of 64; {searching}")
  print(f"  {APPENDED:,} more in {append:.2f} s, {appending}", flush=True)


def ask(store, queries):
  """Seconds of each query alone, queries/s in batches, and what is found."""
  store.nearest(queries[:64], K)
  seconds = []
  for i in range(len(queries)):
    start = time.perf_counter()
    store.nearest(queries[i : i + 1], K)
    seconds.append(time.perf_counter() - start)
  start = time.perf_counter()
  found = [store.nearest(queries[i : i + 64], K)[0] for i in range(0, len(queries), 64)]
  return seconds, len(queries) / (time.perf_counter() - start), np.concatenate(found)


def draw(count, seed):
  """Unit vectors, like embeddings: 24 directions, the same for each seed, and some noise."""
  directions = np.random.default_rng(0).standard_normal((24, WIDTH), np.float32)
  random = np.random.default_rng(seed)
  x = 0.3 * random.standard_normal((count, WIDTH), np.float32)
  x += random.standard_normal((count, 24), np.float32) @ directions
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def rows(first, vectors):
  """As Store.add takes them."""
  numbers = np.arange(first, first + len(vectors))
  folders = pa.DictionaryArray.from_arrays(
    pa.array(numbers % 100, pa.int32()), [f"photos/{i:02d}" for i in range(100)]
  )
  source = pa.DictionaryArray.from_arrays(pa.array(0 * numbers, pa.int32()), ["photos"])
  whole = pa.array(numbers)
  columns = {
    "source": source,
    "folder": folders,
    "name": whole.cast(pa.string()).cast(pa.binary()),
    "date": whole,
    "year": pa.array(np.full(len(numbers), 1970)),
    "stamp_size": whole,
    "stamp_time": whole,
  }
  ids = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # odd: all are different
  return ids, vectors, columns


class Memory:
  """The most memory that a block took beyond what was taken before: the process's own, and that
  with pages of mapped files, which the system takes back when it needs them."""

  def __enter__(self):
    self._before, self._most, self._end = _memory(), _memory(), threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._end.set()
    self._thread.join()

  def _watch(self):
    while not self._end.wait(0.02):
      self._most = np.maximum(self._most, _memory())

  def __str__(self):
    own, mapped = (self._most - self._before) / 1e6
    return f"{own:,.0f} MB of memory ({mapped:,.0f} MB with mapped files)"


def _memory():
  """Bytes: anonymous, and resident."""
  with open(f"/proc/{os.getpid()}/status") as file:
    found = dict(line.split(":", 1) for line in file)
  return np.array([1024 * int(found[name].split()[0]) for name in ("RssAnon", "VmRSS")])
