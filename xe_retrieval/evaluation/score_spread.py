"""Does one threshold mean the same for every query? The paper's point, in figures.

Scores are cosines. The figures come from the scores alone; how well the shown probabilities hold is
measured in calibration/promises.py.
"""

import numpy as np

from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.training import processes

NEIGHBOURS = (1, 10, 100)
PASS = {"opis": (0.01, 0.1), "opis_strict": (0.0001, 0.001)}  # shares of non-matches that pass
THRESHOLDS = 10  # at which the utilities of the queries are compared


def bands(counts):
  """Between which scores 90 % of the queries have their first, tenth, hundredth neighbour.

  The distance between the paper's two orange lines: the narrower, the better calibrated.
  """
  rows = []
  for k in NEIGHBOURS:
    if k <= counts.top.shape[1]:
      low, middle, high = map(float, np.percentile(counts.top[:, k - 1], (5, 50, 95)))
      row = {"neighbours": k, "p5": low, "median": middle, "p95": high, "width": high - low}
      rows.append(row)
  return rows


def best_f1(curve, counts):
  """precision_recall.Curve, PairCounts -> the one threshold with the best F1; percent."""
  i = int(np.argmax(curve.true / (curve.returned + curve.positives)))  # 2PR/(P+R), up to a factor 2
  precision, recall = float(curve.precision[i]), float(curve.recall[i])
  threshold = float(curve.thresholds[i])
  return {
    "threshold": threshold,
    "f1": 100 * 2 * precision * recall / (precision + recall),
    "precision": 100 * precision,
    "recall": 100 * recall,
    "queries_without_result": 100 * float(np.mean(counts.top[:, 0] < threshold)),
  }


def between_queries(pairs, relevance: relevances.Relevance):
  """OPIS and the average precision of one threshold beside that of each query by itself.

  OPIS (Zhang et al., 2024): the variance over queries of the utility 2·sensitivity·specificity /
  (sensitivity + specificity), averaged over the thresholds at which a given share of all
  non-matches pass. `ap_global` / `ap_per_query` says how much of a query's own order survives when
  all queries share one order, whatever the scale of the scores; it falls with the gallery's size.
  """
  per_query, wrong = np.full(len(pairs.text), np.nan), [np.zeros(0, np.float32)]
  for rows, scores, right in relevances.scored(
    pairs, [pairs.images], relevance, "average precision"
  ):
    for q, score, yes in zip(rows, scores, right, strict=True):
      if yes.any():
        per_query[q] = _average_precision(score, yes)
    wrong.append(np.sort(scores[~right])[:: max(scores.size // 200_000, 1)])
  out = {"ap_per_query": float(np.mean(processes.known(per_query)))}
  wrong = processes.joined(np.concatenate(wrong))
  cuts = {
    name: np.quantile(wrong, 1 - np.linspace(*limits, THRESHOLDS)) for name, limits in PASS.items()
  }
  utilities = {name: np.full((len(pairs.text), THRESHOLDS), np.nan) for name in PASS}
  for rows, scores, right in relevances.scored(pairs, [pairs.images], relevance):
    for q, score, yes in zip(rows, scores, right, strict=True):
      if yes.any() and not yes.all():
        for name, levels in cuts.items():
          utilities[name][q] = _utility(score, yes, levels)
  for name, values in utilities.items():
    values = processes.known(values)
    out[name] = float(np.mean(np.var(values, axis=0))) if len(values) else None
  return out


def _utility(score, yes, levels):  # [N], bool [N], [T] -> [T]
  sensitivity = 1 - np.searchsorted(np.sort(score[yes]), levels) / np.count_nonzero(yes)
  specificity = np.searchsorted(np.sort(score[~yes]), levels) / np.count_nonzero(~yes)
  return 2 * sensitivity * specificity / np.maximum(sensitivity + specificity, 1e-12)


def _average_precision(score, yes):
  order = np.argsort(-score, kind="stable")
  hits = np.flatnonzero(yes[order])
  return float(np.mean(np.arange(1, len(hits) + 1) / (hits + 1)))
