"""What an approximate index costs in accuracy: every evaluation that uses one says so."""

import sys
import time

import numpy as np

from xe_retrieval.evaluation import ranks, score_tiles
from xe_retrieval.search.stores import nearest, scann_index

QUERIES = 1000  # that are also answered exactly


def audit(text, image, image_of_text, distractors=None):
  """[Q, D], [M, D], int [Q], [N, D] or a list of such -> the index's part of metrics.json.

  Build time, speed, neighbours found, and the drift of Recall@k that it causes. The index is tuned
  on every other caption, and its neighbours are counted on the captions between.
  """
  text, image, image_of_text = score_tiles.pairing(text, image, image_of_text)
  vectors = np.concatenate(score_tiles.parts(image, distractors))
  print(f"building an index of {len(vectors):,} vectors", file=sys.stderr)
  start = time.perf_counter()
  index = scann_index.build(vectors, queries=text[::2])
  build = time.perf_counter() - start

  k = min(100, len(vectors))
  start = time.perf_counter()
  rows, _ = index.search(text, k)
  seconds = time.perf_counter() - start
  some = np.random.default_rng(0).permutation(np.arange(len(text) > 1, len(text), 2))[:QUERIES]
  exact, _ = nearest.nearest(vectors, text[some], k)

  right = rows == image_of_text[:, None]
  place = np.where(right.any(axis=1), right.argmax(axis=1), len(vectors))  # [Q], lost: last
  true = ranks.text_to_image(text, image, image_of_text, distractors)
  at = [n for n in ranks.AT if n <= k]
  through = {f"recall@{n}": ranks.recall_at(place, n) for n in at}
  return {
    "kind": "scann",
    "settings": index.settings,
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
