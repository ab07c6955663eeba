"""Thresholds that were chosen on one split, on another: do they keep their promise there?"""

import numpy as np

from xe_retrieval.retrieval import profiles, tiles


def measure(pairs, chosen):
  """Pairs, rows of a thresholds.json of other data -> rows: what each threshold gives here.

  Precision depends on how many images are searched, so the two should be of about one size.
  """
  text, image, image_of_text = tiles.pairing(pairs.text, pairs.image, pairs.image_of_text)
  reached = [row for row in chosen if row["threshold"] is not None]
  levels = np.unique(np.array([row["threshold"] for row in reached], np.float32))
  returned = profiles.profiles(text, [image], levels).counts.sum(axis=0, dtype=np.int64)  # [L]
  own = np.einsum("qd,qd->q", text, image[image_of_text])
  out = []
  for row in reached:
    threshold = np.float32(row["threshold"])
    true, count = int(np.sum(own >= threshold)), int(returned[np.searchsorted(levels, threshold)])
    out.append(
      {
        "target_precision": row["target_precision"],
        "threshold": row["threshold"],
        "precision": true / count if count else None,
        "recall": true / len(text),
        "returned": count,
        "true": true,
      }
    )
  return out
