"""What `evaluate --rerank` measures, and reranking.json: how the two stages are added up.

reranking.json lies in the re-ranker's workdir: the weight of the joint logit beside the first
stage's score and the curve from their sum to a probability, both from the calibration split
(validation), with the fingerprints of both models and the number of candidates.
"""

import dataclasses
import json
import sys

import numpy as np

from xe_retrieval.data import paths
from xe_retrieval.evaluation import ranks
from xe_retrieval.reranking import lists, measures, scorer
from xe_retrieval.reranking.first_stage import FirstStage
from xe_retrieval.training import processes

NAME = "reranking.json"


@dataclasses.dataclass(frozen=True)
class Mixture:
  """How first stage and joint logit are added up, and what their sum means."""

  first_stage: str  # fingerprints
  reranker: str
  candidates: int | None  # None: all images
  measured_on: str  # data set and split
  images: int  # of that split
  weight: float  # of the joint logit
  meaning: measures.Meaning
  meaning_before: measures.Meaning  # of the first stage's score alone

  def write(self, workdir):
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    fields |= {name: fields[name].to_dict() for name in _CURVES}
    paths.write(paths.given(workdir) / NAME, json.dumps(fields, indent=2) + "\n")


_CURVES = ("meaning", "meaning_before")


def read(workdir) -> Mixture | None:
  """That of a workdir; None if there is none."""
  path = paths.given(workdir) / NAME
  if not path.exists():
    return None
  try:
    fields = json.loads(path.read_text())
    curves = {name: measures.Meaning.from_dict(fields[name]) for name in _CURVES}
    return Mixture(**fields | curves)
  except (KeyError, TypeError, ValueError) as e:
    raise ValueError(f"{path} is damaged ({e}); evaluate --rerank writes it anew") from e


class Reranking:
  """A re-ranker behind the first stage of a calibration.run.Run; `candidates` None: all images."""

  def __init__(self, workdir, run, candidates):
    self._workdir, self._candidates = workdir, candidates
    self._first = FirstStage(run.workdir, run=run)
    self._scorer = scorer.restore(workdir)
    scorer.require_towers(self._scorer, self._first.towers, workdir)

  def evaluate(self, dataset, split, pairs) -> dict:
    """metrics.json's `rerank`: the first stage's candidates of these Pairs, ordered anew."""
    data = self._first.split(split, dataset, pairs)
    found, speed = lists.read(data, self._scorer, self._candidates)
    seen = not dataset and split == self._first.run.calibration_split
    mixture = self._fitted(data, found) if seen else self._mixture()
    kinds = {
      "first_stage": (0.0, mixture.meaning_before),
      "reranked": (mixture.weight, mixture.meaning),
    }
    count = found.images.shape[1]
    return {
      "workdir": str(self._workdir),
      "loss": self._scorer.config.loss,
      "seed": self._scorer.config.seed,
      "step": self._scorer.step,
      "candidates": count,
      **measures.figures(found, mixture.weight),
      "first_stage": measures.figures(found, 0.0),
      "ceiling": ranks.recall_at(np.where(found.own.any(axis=1), 0, 1), 1),
      "weight": mixture.weight,
      "chosen_on": mixture.measured_on,
      "seen": seen,
      "calibration": {
        name: measures.calibration(found, *settings) for name, settings in kinds.items()
      },
      "pairs_per_second": speed,
      "bytes_per_image": self._scorer.bytes_per_image,
    }

  def _mixture(self) -> Mixture:
    """That of the workdir, or fitted now on the calibration split."""
    known = None
    try:
      known = read(self._workdir)
    except ValueError as e:
      print(e, file=sys.stderr)
    wanted = self._first.run.fingerprint, self._scorer.fingerprint, self._candidates
    fits = known and (known.first_stage, known.reranker, known.candidates) == wanted
    if "" not in processes.exchange("mixture", "fits" if fits else ""):
      return known
    data = self._first.split(self._first.run.calibration_split)
    return self._fitted(data, lists.read(data, self._scorer, self._candidates)[0])

  def _fitted(self, data, found) -> Mixture:
    weight = measures.choose_weight(found)
    mixture = Mixture(
      self._first.run.fingerprint,
      self._scorer.fingerprint,
      self._candidates,
      f"{data.source.name}:{data.source.split}",
      len(data.pairs.image),
      weight,
      measures.calibrate(found, weight),
      measures.calibrate(found, 0.0),
    )
    if processes.is_primary():
      mixture.write(self._workdir)
    return mixture
