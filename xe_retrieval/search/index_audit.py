"""What an approximate index costs in accuracy: every evaluation that uses one says so."""

import tempfile
import time

import numpy as np
import pyarrow as pa

from xe_retrieval.evaluation import ranks, score_tiles
from xe_retrieval.search import stores
from xe_retrieval.search.stores import nearest, scann_index
from xe_retrieval.search.stores.store import OWN

QUERIES = 1000  # that are also answered exactly
_TILE = 1 << 16


def audit(text, image, image_of_text, distractors=None):
  """[Q, D], [M, D], int [Q], [N, D] or a list of such -> the index's part of metrics.json.

  Build time, speed, neighbours found, and the drift of Recall@k that it causes. It is what
  `index --kind=scann` writes and `serve` opens, tuned on every other caption; its neighbours are
  counted on the captions between.
  """
  text, image, image_of_text = score_tiles.pairing(text, image, image_of_text)
  vectors = np.concatenate(score_tiles.parts(image, distractors))
  k = min(100, len(vectors))
  with tempfile.TemporaryDirectory() as directory:
    start = time.perf_counter()
    store = _written(directory, vectors, text[::2])
    build = time.perf_counter() - start
    start = time.perf_counter()
    rows, _ = store.nearest(text, k)
    seconds = time.perf_counter() - start
    built, settings = described(store)
  rows = rows.astype(np.int64)
  some = np.random.default_rng(0).permutation(np.arange(len(text) > 1, len(text), 2))[:QUERIES]
  exact, _ = nearest.nearest(vectors, text[some], k)

  right = rows == image_of_text[:, None]
  place = np.where(right.any(axis=1), right.argmax(axis=1), len(vectors))  # [Q], lost: last
  true = ranks.text_to_image(text, image, image_of_text, distractors)
  at = [n for n in ranks.AT if n <= k]
  through = {f"recall@{n}": ranks.recall_at(place, n) for n in at}
  return {
    "kind": "scann",
    "built": built,
    "settings": settings,
    "vectors": len(vectors),
    "build_seconds": build,
    "neighbours": k,
    "queries_per_second": len(text) / seconds,
    "neighbours_found": {
      str(n): 100 * scann_index.overlap(rows[some, :n], exact[:, :n]) for n in at
    },
    "text_to_image": through,
    "drift": {f"recall@{n}": through[f"recall@{n}"] - ranks.recall_at(true, n) for n in at},
  }


def _written(directory, vectors, queries):
  """A store of files with vectors by their row numbers, as `index` makes it."""
  about = {"kind": "files", "index": "scann"}
  store = stores.create(directory, about, {}, vectors.shape[1])
  for start in range(0, len(vectors), _TILE):
    ids = np.arange(start, min(start + _TILE, len(vectors)), dtype=np.uint64)
    nothing = pa.nulls(len(ids))
    store.add(ids, vectors[start : start + _TILE], {name: nothing for name in OWN})
  return stores.open(directory, store.commit(lambda: queries), {})


def described(store) -> tuple[str, dict | None]:
  """What a store of files has built, in words, and the settings of its largest index."""
  hashed = [segment.index for segment in store.segments if segment.about["ann"]]
  if not hashed:
    return "nothing, so few vectors are all compared with", None
  largest = max(hashed, key=len)
  leaves = largest.settings["leaves"]
  how = f"a tree of {leaves:,} leaves and hashes" if leaves else "hashes without a tree"
  exact = len(store) - sum(map(len, hashed))
  rest = f", and {max(exact, 0):,} vectors compared with" if exact > 0 else ""
  times = f"{len(hashed)} × " if len(hashed) > 1 else ""
  return f"ScaNN, {times}{how}{rest}", largest.settings


def served(store, queries, asked: str) -> dict:
  """float32 [Q, width] text queries -> the share of the ten nearest that search finds.

  `asked` says what the queries are.
  """
  k = min(10, len(store))
  found, _ = store.nearest(queries, k)
  exact, _ = store.nearest(queries, k, exact=True)
  recall = scann_index.overlap(found, exact)
  return {"recall_at_10": round(recall, 4), "queries": len(queries), "asked": asked}


EXACT = {"recall_at_10": 1.0, "queries": 0, "asked": "every image is compared with"}
