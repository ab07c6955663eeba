"""Were promises kept? A calibration chosen on one split, judged on pairs it has not seen."""

import numpy as np

from xe_retrieval.calibration import fitting, keywords
from xe_retrieval.calibration.counts import LEVELS
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.training import processes

TARGETS = (0.3, 0.5, 0.7, 0.9)
TOP = 10  # results of a query whose probabilities are judged
BINS = 15


def judge(calibration, pairs, gallery, sources) -> list[dict]:
  """The rows of metrics.json's `promises`: precision asked for and kept, for each source.

  `kept` is the precision of what the threshold returns here, None where it returns nothing;
  `lower_bound` what the calibration could promise with confidence; `returned` the share of queries
  that get any result.
  """
  rows = []
  images = sum(len(part.vectors) for part in gallery)
  for meaning, source in _matching(calibration, sources, gallery):
    queries = _described(calibration, pairs, source)
    here = fitting.count(pairs, gallery, source, queries, meaning.calibrator)
    counts = meaning.counts
    for target in TARGETS:
      for guarantee in (False, True):
        logit = counts.at_precision(target, images, guarantee)
        row = {"relevance": source.name, "target": target, "gallery": images}
        rows.append(row | {"guarantee": guarantee} | _kept(counts, here, logit, images))
  return rows


def _kept(counts, here, logit, images):
  if logit is None:
    return {"threshold": None, "kept": None, "lower_bound": None, "returned": 0.0, "pairs": 0}
  i = int(np.searchsorted(LEVELS, logit - 1e-9))
  pairs = int(here.relevant[i] + here.irrelevant[i])
  return {
    "threshold": logit,
    "kept": float(here.relevant[i] / pairs) if pairs else None,
    "lower_bound": float(counts.lower_bound(images)[i]),
    "returned": float(here.answered[i] / here.queries),
    "pairs": pairs,
  }


def shown_probability(calibration, pairs, gallery, sources) -> dict:
  """How true the number beside a result is, over the first TOP results of every query.

  {source: {"ece", "brier", "reliability": [[mean probability, share relevant, pairs], …]}}.
  """
  out = {}
  images = sum(len(part.vectors) for part in gallery)
  for meaning, source in _matching(calibration, sources, gallery):
    queries = _described(calibration, pairs, source)
    best = min(TOP, images)
    shown, right = np.full((2, len(pairs.text), best), np.nan)
    for rows, scores, relevant in relevances.scored(pairs, gallery, source):
      top = np.argpartition(-scores, best - 1, axis=1)[:, :best]
      logits = meaning.calibrator.logit(np.take_along_axis(scores, top, axis=1), queries[rows])
      shown[rows] = meaning.probability(logits, images)
      right[rows] = np.take_along_axis(relevant, top, axis=1)
    shown, right = processes.known(shown).ravel(), processes.known(right).ravel()
    out[source.name] = reliability(shown, right.astype(bool))
  return out


def reliability(shown, right) -> dict:
  """float [P] probabilities, bool [P] -> expected calibration error, Brier score, the diagram."""
  cell = np.minimum((shown * BINS).astype(int), BINS - 1)
  size = np.bincount(cell, minlength=BINS)
  mean, share = (
    np.bincount(cell, x, BINS) / np.maximum(size, 1) for x in (shown, right.astype(float))
  )
  return {
    "ece": float(np.abs(mean - share) @ size / len(shown)),
    "brier": float(np.mean((shown - right) ** 2)),
    "reliability": [
      [float(m), float(s), int(n)] for m, s, n in zip(mean, share, size, strict=True) if n
    ],
  }


def _matching(calibration, sources, gallery):
  """The meanings at this size and sources of one name that know the whole gallery.

  Where people have judged, but the calibration knows none of their judgements, they judge its best.
  """
  known = {source.name: source for source in sources if source.parts >= len(gallery)}
  meanings = [*calibration.meanings, *([calibration.words] if calibration.words else [])]
  found = [(m, known[m.relevance]) for m in meanings if m.relevance in known]
  if "people" in known and "people" not in [m.relevance for m, _ in found]:
    found.append((calibration.best, known["people"]))
  images = sum(len(part.vectors) for part in gallery)
  return [(meaning.at(images), source) for meaning, source in found]


def _described(calibration, pairs, source):
  if source.name == keywords.NAME:
    return calibration.vocabulary.describe(pairs.captions, pairs.text)
  return calibration.queries(pairs.captions, pairs.text, pairs.features)
