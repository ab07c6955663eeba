"""Thresholds of one split on another, against counting the score matrix."""

import numpy as np

from xe_retrieval.evaluation import thresholds
from xe_retrieval.evaluation.embedded import Pairs


def test_what_a_threshold_chosen_elsewhere_gives_here():
  random = np.random.default_rng(0)
  text, image = (random.standard_normal((n, 8)).astype(np.float32) for n in (60, 20))
  text, image = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
  own = np.repeat(np.arange(20), 3)
  pairs = Pairs(text, image, own, [""] * 60, lambda m: b"")
  chosen = [(0.5, 0.3), (0.8, 0.45), (0.9, 1.5), (0.95, None)]
  rows = thresholds.measure(pairs, [dict(target_precision=p, threshold=t) for p, t in chosen])
  scores = text @ image.T
  for row, (target, threshold) in zip(rows, chosen, strict=False):
    hit = scores >= threshold
    true = hit[np.arange(60), own].sum()
    assert (row["target_precision"], row["threshold"]) == (target, threshold)
    assert (row["returned"], row["true"]) == (hit.sum(), true)
    assert row["recall"] == true / 60
    assert row["precision"] == (true / hit.sum() if hit.any() else None)
  assert len(rows) == 3 and rows[0]["true"] > 0 and rows[2]["precision"] is None
