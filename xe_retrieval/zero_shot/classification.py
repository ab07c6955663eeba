"""Images -> which of some labels fit each, by captions made of the labels; or none of them.

A label's vector is the mean of its captions', one for each template. Whether it fits an image has
the probability that search would show for that image and caption among these images.
"""

import dataclasses
import pathlib
import sys

import numpy as np

from xe_retrieval import model as models
from xe_retrieval.calibration import artifact
from xe_retrieval.calibration.artifact import DEFAULT_PROBABILITY, Calibration
from xe_retrieval.data import decoding

TEMPLATES = ("{}",)
DIGITS = 4  # of scores and probabilities, as search shows them


@dataclasses.dataclass(frozen=True)
class Answer:
  """Of one image: the labels that fit, best first, and the nearest one, which may not."""

  image: str
  fitting: list[dict]  # label, probability (None: not calibrated) and score; [] is none of these
  nearest: dict

  def to_dict(self):
    label = self.fitting[0]["label"] if self.fitting else None
    return {"image": self.image, "label": label, "labels": self.fitting, "nearest": self.nearest}


class Classifier:
  def __init__(self, model, calibration: Calibration | None, labels, templates=TEMPLATES):
    self.model, self.calibration, self.labels = model, calibration, list(labels)
    texts = [[_fill(template, label) for template in templates] for label in self.labels]
    vectors, features = model.embed_queries([text for captions in texts for text in captions])
    vectors, features = (
      x.reshape(len(labels), -1, x.shape[1]).mean(1) for x in (vectors, features)
    )
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    self._vectors = model.scoring.text(vectors, features)  # [L, width]
    self._known = [self._describe(i, texts[i], features) for i in range(len(texts))]

  def _describe(self, i, captions, features):
    """What a label's captions mean, as search takes them: by words or as captions; Queries of 1.

    Its own words count: those of a template are known, whatever is put into it.
    """
    if self.calibration is None:
      return None
    one, calibration = slice(i, i + 1), self.calibration
    if all(map(calibration.are_words, captions)):
      known = calibration.vocabulary.describe(self.labels[one], self._vectors[one])
      return calibration.words, known
    known = calibration.queries(self.labels[one], self._vectors[one], features[one])
    return calibration.best, known

  def classify(self, sources, min_probability=None, threshold=None):
    """Image sources -> an Answer per readable image, and [(image, reason)] of the others.

    A label fits from `min_probability` on (by default 0.5), or from a score `threshold` on.
    """
    if threshold is not None and min_probability is not None:
      raise ValueError("min_probability and threshold exclude each other: give one of them")
    if threshold is None and self.calibration is None:
      raise ValueError(
        "from which score on a label fits is not known, as this model was not evaluated: "
        "python -m xe_retrieval.evaluate does that; or give a threshold (-1: the nearest label "
        "always fits)"
      )
    names, vectors, failed = self._embed(sources)
    if not names:
      raise ValueError("there is no image to classify" + f" ({failed[0][1]})" * bool(failed))
    scores = self._vectors @ self.model.scoring.image(vectors).T  # [L, M]
    scores = np.round(scores.astype(np.float64), DIGITS)  # as shown: the probability is of these
    shown = self._probabilities(scores)
    if threshold is None:
      least = DEFAULT_PROBABILITY if min_probability is None else min_probability
      fits = shown >= least
    else:
      fits = scores >= threshold
    return [
      self._answer(name, *x) for name, *x in zip(names, scores.T, shown.T, fits.T, strict=True)
    ], failed

  def _probabilities(self, scores):  # [L, M] -> [L, M]; NaN: not calibrated
    if self.calibration is None:
      return np.full(scores.shape, np.nan)
    shown, images = np.empty(scores.shape), scores.shape[1]
    for i, (meaning, known) in enumerate(self._known):
      meaning = meaning.at(images)
      shown[i] = meaning.probability(meaning.calibrator.logit(scores[i : i + 1], known)[0], images)
    return shown

  def _answer(self, name, scores, shown, fits):
    order = np.lexsort((-scores, -np.nan_to_num(shown)))
    found = [
      {
        "label": self.labels[i],
        "probability": None if np.isnan(shown[i]) else round(float(shown[i]), DIGITS),
        "score": float(scores[i]),
      }
      for i in order
    ]
    return Answer(name, [label for i, label in zip(order, found, strict=True) if fits[i]], found[0])

  def _embed(self, sources):
    """-> names [M], float32 [M, D], [(name, reason)]."""
    view, names, vectors, failed = decoding.View.of(self.model.config.image), [], [], []
    for source in sources:
      entries = list(source.entries())
      for start in range(0, len(entries), models.BATCH):
        squares = []
        for entry in entries[start : start + models.BATCH]:
          name = source.full_name(entry.name)
          try:
            squares.append(decoding.square(source.read(entry.name), view=view))
            names.append(name)
          except (OSError, ValueError) as error:
            failed.append((name, str(error).removeprefix("images[0] is ")))
        if squares:
          vectors.append(self.model.embed_squares([np.stack(squares)], len(squares)))
    return names, np.concatenate(vectors) if vectors else np.zeros((0, 1)), failed


def open_classifier(path, labels, templates=TEMPLATES, calibrated="") -> Classifier:
  """The model of a workdir, export or CLIP; calibrated there or in the workdir `calibrated`."""
  model = models.load(path)
  calibration = None
  for directory in filter(None, (path, calibrated)):
    if pathlib.Path(directory).expanduser().exists():
      calibration = calibration or artifact.read(directory, model.fingerprint())
  return Classifier(model, calibration, labels, templates)


def read_labels(path) -> list[str]:
  """One label per line; empty lines and those that begin with # are left out."""
  try:
    text = sys.stdin.read() if path == "-" else pathlib.Path(path).expanduser().read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"--labels={path} is no readable file of labels ({error})") from error
  lines = [line.strip() for line in text.splitlines()]
  labels = [line for line in lines if line and not line.startswith("#")]
  if not labels:
    raise ValueError(f"--labels={path} holds no label; expected one per line")
  if twice := sorted({label for label in labels if labels.count(label) > 1}):
    raise ValueError(f"--labels={path} names {twice[0]!r} more than once")
  return labels


def _fill(template, label):
  if "{}" not in template:
    raise ValueError(f"--template={template!r} has no {{}}, where the label is put")
  return template.replace("{}", label)
