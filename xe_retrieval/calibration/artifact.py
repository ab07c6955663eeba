"""calibration.json: what scores of a model mean, by every source of relevance there was.

Written once, from the split that the config names; read by search, serve and export. bank.npz lies
beside it.
"""

import dataclasses
import json
import pathlib

import numpy as np

from xe_retrieval.calibration import bank as banks
from xe_retrieval.calibration import fitting
from xe_retrieval.calibration.calibrator import Calibrator, Queries
from xe_retrieval.calibration.counts import CONFIDENCE, Counts
from xe_retrieval.evaluation import relevance as relevances

NAME = "calibration.json"
FORMAT = 1
DEFAULT_PROBABILITY = 0.5


@dataclasses.dataclass(frozen=True)
class Cut:
  """What is returned: everything from a log-odds on, or from a score; neither: nothing is."""

  asked: str  # probability, precision, wrong or score
  value: float
  logit: float | None = None
  score: float | None = None
  expect: dict | None = None  # see Counts.expect


@dataclasses.dataclass(frozen=True)
class Meaning:
  """What scores mean by one source of relevance."""

  relevance: str  # a key of relevance.MEANING
  calibrator: Calibrator
  counts: Counts

  def probability(self, logits, images: int):
    """Log-odds of the calibrator -> probabilities in a collection of that many images."""
    logits = np.asarray(logits)
    return 0.5 * (1 + np.tanh((logits + self.counts.shift(logits, images)) / 2))

  def cut(
    self, images, min_probability=None, max_wrong=None, min_precision=None, guarantee=False
  ) -> Cut:
    """At most one of the three; by default probability 0.5. With `guarantee`, bounds must reach it.

    A target that cannot be reached gives a cut that returns nothing.
    """
    counts = self.counts
    if max_wrong is not None:
      asked, value, logit = "wrong", max_wrong, counts.at_wrong(max_wrong, images)
    elif min_precision is not None:
      asked, value = "precision", min_precision
      logit = counts.at_precision(min_precision, images, guarantee)
    else:
      value = DEFAULT_PROBABILITY if min_probability is None else min_probability
      asked, odds = "probability", value / max(1 - value, 1e-9)
      logit = counts.level(float(np.log(max(odds, 1e-9))), images)
    expect = None if logit is None else counts.expect(logit, images)
    return Cut(asked, value, logit, None, expect)


@dataclasses.dataclass(frozen=True)
class Calibration:
  about: dict  # model, dataset, split, step, queries, images, distractors
  meanings: list[Meaning]  # best source of relevance first
  bank: banks.Bank | None

  @property
  def best(self) -> Meaning:
    return self.meanings[0]

  def queries(self, text, features) -> Queries:
    """Unit vectors [Q, D], text-tower features [Q, W] -> what the calibrator knows of them."""
    return fitting.describe(self.bank, text, features)

  def measured_on(self) -> str:
    about = self.about
    size = f"{about['queries']:,} captions × {about['images']:,} images"
    return f"{about['dataset']} {about['split']} ({size})"

  def write(self, directory) -> None:
    """calibration.json and bank.npz, each whole or not at all."""
    directory = pathlib.Path(directory)
    if self.bank:
      self.bank.write(directory / banks.NAME)
    content = {"format": FORMAT, **self.about, "confidence": CONFIDENCE, "relevance": {}}
    for meaning in self.meanings:
      content["relevance"][meaning.relevance] = {
        "relevant": relevances.MEANING[meaning.relevance],
        "calibrator": meaning.calibrator.to_dict(),
        "counts": meaning.counts.to_dict(),
      }
    part = directory / f"{NAME}.part"
    part.write_text(json.dumps(content, allow_nan=False) + "\n")
    part.replace(directory / NAME)


def make(pairs, gallery, sources, bank, about: dict) -> Calibration:
  """Fitted on embedded pairs and a gallery [Images], by each source of relevance."""
  queries = fitting.describe(bank, pairs.text, pairs.features)
  meanings = [Meaning(s.name, *fitting.fit(pairs, gallery, s, queries)) for s in sources]
  return Calibration(about, meanings, bank)


def read(directory, fingerprint: str) -> Calibration | None:
  """That of a workdir, index or exported directory, if there is one of this very model."""
  path = pathlib.Path(directory).expanduser() / NAME
  if not path.is_file():
    return None
  try:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
      raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
    parts = content.pop("relevance")
    meanings = [
      Meaning(name, Calibrator.from_dict(p["calibrator"]), Counts.from_dict(p["counts"]))
      for name, p in parts.items()
      if name in relevances.MEANING
    ]
    _ = [content[key] for key in ("dataset", "split", "queries", "images", "model")]
    if not meanings:
      raise ValueError("it holds no source of relevance")
  except (KeyError, TypeError, ValueError, AttributeError) as e:
    raise ValueError(
      f"{path} is no {NAME} that this version reads ({type(e).__name__}: {e}); "
      "python -m xe_retrieval.evaluate --workdir=… writes it anew"
    ) from e
  if content["model"] != fingerprint:
    return None
  bank = banks.read(directory, fingerprint)
  if bank is None and any(len(meaning.calibrator.familiar) for meaning in meanings):
    raise ValueError(
      f"{path} needs the {banks.NAME} that was written with it; "
      "python -m xe_retrieval.evaluate --workdir=… writes both anew"
    )
  return Calibration(content, meanings, bank)
