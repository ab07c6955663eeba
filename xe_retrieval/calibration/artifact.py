"""calibration.json: what scores of a model mean, by every source of relevance there was.

Written once, from the split that the config names; read by search, serve and export. bank.npz lies
beside it.
"""

import dataclasses
import functools
import json

import numpy as np

from xe_retrieval.calibration import fitting, keywords
from xe_retrieval.calibration.calibrator import Calibrator, Queries
from xe_retrieval.calibration.counts import CONFIDENCE, LEVELS, Counts
from xe_retrieval.data import paths
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.towers import bank as banks

NAME = "calibration.json"
FORMAT = 3
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
  larger: "Meaning | None" = None  # in the gallery with its distractors, where there were any

  def at(self, images: int) -> "Meaning":
    """That of the gallery whose size is nearest to a collection's: less is extrapolated."""
    known = [self, *([self.larger] if self.larger else [])]
    return min(known, key=lambda one: abs(np.log(max(images, 1) / one.counts.images)))

  def probability(self, logits, images: int):
    """Log-odds of the calibrator -> probabilities in a collection of that many images."""
    logits = np.asarray(logits)
    shift = np.interp(logits, LEVELS, self._levels(images) - LEVELS)
    return 0.5 * (1 + np.tanh((logits + shift) / 2))

  def _level(self, logit, images):
    """Which log-odds of the calibrator become this one in a collection of that size."""
    return float(np.interp(logit, self._levels(images), LEVELS, -np.inf, np.inf))

  def _levels(self, images):
    """What LEVELS become in a collection of that size, float64 [L], rising."""
    levels = LEVELS + self.counts.shifts(images) + 1e-9 * np.arange(len(LEVELS))
    return np.maximum.accumulate(levels)

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
      logit = self._level(float(np.log(max(odds, 1e-9))), images)
    expect = None if logit is None else counts.expect(logit, images)
    return Cut(asked, value, logit, None, expect)

  def to_dict(self) -> dict:
    larger = self.larger and self.larger.to_dict()
    parts = {"calibrator": self.calibrator.to_dict(), "counts": self.counts.to_dict()}
    return parts | {"larger": larger}

  @classmethod
  def from_dict(cls, relevance, fields):
    calibrator = Calibrator.from_dict(fields["calibrator"])
    larger = fields["larger"] and cls.from_dict(relevance, fields["larger"])
    return cls(relevance, calibrator, Counts.from_dict(fields["counts"]), larger)


@dataclasses.dataclass(frozen=True)
class Calibration:
  about: dict  # model, dataset, split, step, queries, images, distractors
  meanings: list[Meaning]  # best source of relevance first
  bank: banks.Bank | None
  words: Meaning | None = None  # of queries of a few words

  @property
  def best(self) -> Meaning:
    return self.meanings[0]

  @functools.cached_property
  def vocabulary(self) -> keywords.Vocabulary | None:
    return keywords.Vocabulary(self.bank) if self.bank else None

  def queries(self, captions, text, features) -> Queries:
    """Queries [Q], vectors [Q, ≥ D], text-tower features [Q, W] -> what is known of them."""
    known = fitting.describe(self.bank, text, features)
    if self.bank:
      strange = [self.vocabulary.strange(caption) for caption in captions]
      known.familiarity[strange] = -np.inf
    return known

  def are_words(self, query: str) -> bool:
    """Whether a query has the meaning of a few words instead of a caption's."""
    return self.words is not None and self.vocabulary.knows(query)

  def measured_on(self) -> str:
    about = self.about
    size = f"{about['queries']:,} captions × {about['images']:,} images"
    return f"{about['dataset']} {about['split']} ({size})"

  def write(self, directory) -> None:
    """calibration.json and bank.npz, each whole or not at all."""
    directory = paths.given(directory)
    if self.bank:
      self.bank.write(directory / banks.NAME)
    content = {"format": FORMAT, **self.about, "confidence": CONFIDENCE, "relevance": {}}
    for meaning in [*self.meanings, *([self.words] if self.words else [])]:
      content["relevance"][meaning.relevance] = {
        "relevant": relevances.MEANING[meaning.relevance],
        **meaning.to_dict(),
      }
    paths.write(directory / NAME, json.dumps(content, allow_nan=False) + "\n")


def make(pairs, gallery, sources, bank, about: dict, words=None) -> Calibration:
  """Fitted on embedded pairs and their images, by each source of relevance.

  `gallery` [Images] begins with these; with more, there is a second fit in all of it, since as a
  rule the model was trained on the distractors. `words` are Pairs of queries of a few words.
  """
  queries = fitting.describe(bank, pairs.text, pairs.features)
  meanings = [_meaning(pairs, gallery, source, queries) for source in sources]
  if words:
    queries = keywords.Vocabulary(bank).describe(words.captions, words.text)
    source = keywords.relevance(words.captions, gallery)
    words = _meaning(words, gallery, source, queries, rare=0)  # its words are known ones
  return Calibration(about, meanings, bank, words)


def _meaning(pairs, gallery, source, queries, **how):
  def fit(parts, larger=None):
    return Meaning(
      source.name, *fitting.fit(pairs, gallery[:parts], source, queries, **how), larger
    )

  parts = min(source.parts, len(gallery))
  return fit(1, fit(parts) if parts > 1 else None)


def read(directory, fingerprint: str) -> Calibration | None:
  """That of a workdir, index or exported directory, if there is one of this very model."""
  path = paths.given(directory) / NAME
  if not path.exists():
    return None
  try:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
      raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
    parts = content.pop("relevance")
    meanings = [
      Meaning.from_dict(name, p) for name, p in parts.items() if name in relevances.MEANING
    ]
    words = next((m for m in meanings if m.relevance == keywords.NAME), None)
    meanings = [meaning for meaning in meanings if meaning is not words]
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
  familiar = any(len(meaning.calibrator.familiar) for meaning in meanings)
  if bank is None and (familiar or words):
    raise ValueError(
      f"{path} needs the {banks.NAME} that was written with it; "
      "python -m xe_retrieval.evaluate --workdir=… writes both anew"
    )
  return Calibration(content, meanings, bank, words)
