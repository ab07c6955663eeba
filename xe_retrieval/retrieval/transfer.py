"""Thresholds that were chosen on one split, on another: do they keep their promise there?"""

import numpy as np

from xe_retrieval.retrieval import tiles


def measure(pairs, chosen):
  """Pairs, rows of a thresholds.json of other data -> rows: what each threshold gives here.

  Precision depends on how many images are searched, so the two should be of about one size.
  """
  text, image, image_of_text = tiles.pairing(pairs.text, pairs.image, pairs.image_of_text)
  reached = [row for row in chosen if row["threshold"] is not None]
  thresholds = np.array([row["threshold"] for row in reached], np.float32)
  returned, true = np.zeros((2, len(reached)), np.int64)
  for start, documents in tiles.stream([image], tiles.DOCUMENTS):
    for rows in tiles.spans(len(text), tiles.QUERIES):
      scores = tiles.product(text[rows], documents)  # [q, n]
      own = image_of_text[rows] - start
      here = np.flatnonzero((own >= 0) & (own < len(documents)))
      own = scores[here, own[here]]  # of the very product that is counted
      for i, threshold in enumerate(thresholds):
        returned[i] += np.count_nonzero(scores >= threshold)
        true[i] += np.count_nonzero(own >= threshold)
  return [
    {
      "target_precision": row["target_precision"],
      "threshold": row["threshold"],
      "precision": float(right / count) if count else None,
      "recall": float(right / len(text)),
      "returned": int(count),
      "true": int(right),
    }
    for row, count, right in zip(reached, returned, true, strict=True)
  ]
