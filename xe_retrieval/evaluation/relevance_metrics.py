"""Retrieval figures against any source of relevance, not only against the pairing.

"a red circle" was written for one scene, but is true of many.
"""

import numpy as np

from xe_retrieval.evaluation import precision_recall
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.training import processes

STEPS = 2**20  # scores are rounded to 2⁻²⁰ here, since any of the pairs can be a positive
LIMIT = 2  # of their size: cosines, and what a bank makes of them


def measure(pairs, gallery, relevance: relevances.Relevance):
  """-> figures in percent, and the precision-recall curve over all pairs.

  pr_auc      area under precision and recall of one threshold for all queries
  map_at_r    mean over queries of the average precision of their first R results
  r_precision share of relevant images among the first R, R the number of relevant ones
  """
  gallery = gallery[: relevance.parts]
  returned, true = np.zeros((2, 2 * LIMIT * STEPS + 1), np.int64)
  map_at_r, r_precision = np.full((2, len(pairs.text)), np.nan)
  for rows, scores, right in relevances.scored(pairs, gallery, relevance, f"{relevance.name}"):
    step = LIMIT * STEPS - np.rint(np.clip(scores, -LIMIT, LIMIT) * STEPS).astype(np.int32)
    returned += np.bincount(step.ravel(), minlength=len(returned))
    true += np.bincount(step[right], minlength=len(true))
    for q, score, yes in zip(rows, scores, right, strict=True):
      count = np.count_nonzero(yes)
      if count:
        first = np.argsort(-score, kind="stable")[:count]
        hits = yes[first]
        precision = np.cumsum(hits) / np.arange(1, count + 1)
        map_at_r[q], r_precision[q] = np.mean(precision * hits), np.mean(hits)
  returned, true = processes.total(np.stack([returned, true]))
  curve = _curve(np.cumsum(returned), np.cumsum(true))
  return {
    "pr_auc": 100 * curve.average_precision,
    "map_at_r": 100 * float(np.mean(processes.known(map_at_r))),
    "r_precision": 100 * float(np.mean(processes.known(r_precision))),
    "queries": len(relevance.queries),
    "relevant_per_query": curve.positives / len(relevance.queries),
  }, curve


def _curve(returned, true):
  """Counts of pairs with score ≥ LIMIT, LIMIT − 1/STEPS, … -> precision_recall.Curve."""
  at = np.flatnonzero(np.diff(true, prepend=0))
  levels = (LIMIT - at / STEPS).astype(np.float32)
  return precision_recall.Curve(levels, true[at], returned[at], int(true[-1]), int(returned[-1]))
