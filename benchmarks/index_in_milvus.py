"""Synthetic vectors in Milvus-lite: `python -m benchmarks.index --only=milvus`."""

import multiprocessing
import pathlib
import tempfile
import time

import numpy as np

from benchmarks.index_on_disk import TILE, WIDTH, K, Memory, ask, draw, rows

QUERIES = 20  # that are asked; milvus-lite takes seconds for one of a million vectors


def measure(count, kind, folder=None):
  """Prints the figures of one size and kind of index. A process of its own, as for files."""
  process = multiprocessing.get_context("spawn").Process(
    target=_measure, args=(count, kind, folder)
  )
  process.start()
  process.join()
  if process.exitcode:
    raise SystemExit(f"{count:,} vectors: the process ended with {process.exitcode}")


def _measure(count, kind, folder):
  from xe_retrieval.search import stores
  from xe_retrieval.search.stores import milvus_client, nearest, scann_index

  with tempfile.TemporaryDirectory(dir=folder) as directory:
    path, queries = pathlib.Path(directory), draw(QUERIES, seed=1)
    place = stores.parse(f"milvus:{path}/vectors.db,vectors", path)
    # Libraries and an empty engine are not the index's memory.
    store, drawing, truth = stores.create(path, place | {"index": kind}, {}, WIDTH), 0.0, []
    with Memory() as build:
      start = time.perf_counter()
      for first in range(0, count, TILE):
        began = time.perf_counter()
        vectors = draw(min(TILE, count - first), seed=(2, first))
        some, scores = nearest.nearest(vectors, queries, K)
        truth.append((rows(first, vectors)[0][some], scores))
        drawing += time.perf_counter() - began
        store.add(*rows(first, vectors))
      about = store.commit()
      seconds = time.perf_counter() - start - drawing
    milvus_client.sync(store.client.file)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with Memory() as searching:
      store = stores.open(path, about, {})
      one, several, found = ask(store, queries)
  ids, scores = (np.hstack(parts) for parts in zip(*truth, strict=True))
  exact = np.take_along_axis(ids, np.argsort(-scores, axis=1)[:, :K], axis=1)
  print(f"{count:,} × {WIDTH} in Milvus-lite, {about['built']}")
  print(f"  built in {seconds:,.1f} s, {build}")
  print(f"  on disk {size / 1e9:.2f} GB, {size / count:,.0f} bytes an image")
  print(f"  recall@10 {scann_index.overlap(found, exact):.4f} of {len(queries):,} queries")
  print(
    f"  p95 {1e3 * np.quantile(one, 0.95):.1f} ms, median {1e3 * np.median(one):.1f} ms;", end=""
  )
  print(f" {several:,.1f} queries/s in batches of 64; {searching}", flush=True)
