"""How many relevant and irrelevant pairs lie above each log-odds, and what follows for any size.

The counts are those of a gallery of M images. In a collection of N images from the same source

    share   as large a share of the images is relevant:        relevant × N/M, irrelevant × N/M
    count   as many images are relevant, however many there are: relevant × 1,  irrelevant × N/M

(up to the relevant ones themselves, which are no candidates for irrelevant). So the odds of a pair
stay as they are, or shrink by (M − r)/(N − r), where r images are relevant to a query.
"""

import dataclasses

import numpy as np

from xe_retrieval.calibration import bounds

LEVELS = np.round(np.arange(-12, 12.001, 0.05), 2)  # log-odds at which pairs are counted
SUPPORT = 30  # pairs: what returns fewer says too little about precision
CONFIDENCE = 0.9


@dataclasses.dataclass(frozen=True)
class Counts:
  """Pairs with z ≥ LEVELS, and the sums over groups that their uncertainty follows from.

  A group is an image with all of its captions: captions of one image are not independent.
  """

  scales: str  # "share" or "count"
  images: int  # M
  queries: int
  positives: int  # relevant pairs in all
  relevant: np.ndarray  # int64 [L], falling
  irrelevant: np.ndarray  # int64 [L], falling
  squares: np.ndarray  # float64 [3, L]: Σ r², Σ r·t, Σ t² over groups, t = relevant + irrelevant
  answered: np.ndarray  # int64 [L]: queries with at least one pair

  @property
  def per_query(self) -> float:
    """Relevant images of a query in the gallery."""
    return self.positives / self.queries

  def shift(self, images: int) -> float:
    """To be added to log-odds in a collection of that many images."""
    return float(np.log(self._scale_relevant(images) / self._scale_irrelevant(images)))

  def precision(self, images: int):
    """Of everything from each level on, in a collection of that many images; NaN: nothing."""
    true = self.relevant * self._scale_relevant(images)
    all_ = true + self.irrelevant * self._scale_irrelevant(images)
    return np.divide(true, all_, out=np.full(len(true), np.nan), where=all_ > 0)

  def lower_bound(self, images: int, confidence: float = CONFIDENCE):
    """One-sided lower confidence bound of `precision`; 0 where nothing can be said."""
    returned = self.relevant + self.irrelevant
    low = bounds.precision(self.relevant, returned, self.squares, confidence)
    odds = low / np.maximum(1 - low, 1e-12) * np.exp(self.shift(images))
    return odds / (1 + odds)

  def wrong(self, images: int):
    """Irrelevant images that a query gets from each level on."""
    return self.irrelevant * self._scale_irrelevant(images) / self.queries

  def returned(self, images: int):
    """Images that a query gets from each level on."""
    return self.wrong(images) + self.relevant * self._scale_relevant(images) / self.queries

  def at_precision(self, target: float, images: int, guarantee: bool = False) -> float | None:
    """The lowest level down to which every level keeps the target; None if none does.

    Going down from the level with SUPPORT pairs and stopping at the first failure keeps the
    confidence of a single test although many levels are tried (fixed-sequence testing).
    """
    kept = self.lower_bound(images) if guarantee else self.precision(images)
    enough = np.flatnonzero(self.relevant + self.irrelevant >= SUPPORT)
    if not enough.size:
      return None
    last = None
    for level in range(enough[-1], -1, -1):
      if not kept[level] >= target:
        break
      last = level
    return None if last is None else float(LEVELS[last])

  def at_wrong(self, most: float, images: int) -> float:
    """The lowest level at which a query gets at most so many irrelevant images in the mean."""
    fine = np.flatnonzero(self.wrong(images) <= most)
    return float(LEVELS[fine[0]]) if fine.size else float(LEVELS[-1])

  def expect(self, level: float, images: int) -> dict:
    """What returning everything from a level on gives in a collection of that many images."""
    i = int(np.clip(np.searchsorted(LEVELS, level - 1e-9), 0, len(LEVELS) - 1))
    precision, low = self.precision(images)[i], self.lower_bound(images)[i]
    enough = self.relevant[i] + self.irrelevant[i] >= SUPPORT
    return {
      "precision": float(precision) if enough and np.isfinite(precision) else None,
      "precision_at_least": float(low) if enough else None,
      "recall": float(self.relevant[i] / max(self.positives, 1)),
      "results_per_query": float(self.returned(images)[i]),
      "wrong_per_query": float(self.wrong(images)[i]),
    }

  def _scale_relevant(self, images):
    return images / self.images if self.scales == "share" else 1.0

  def _scale_irrelevant(self, images):
    if self.scales == "share":
      return images / self.images
    return max(images - self.per_query, 1) / max(self.images - self.per_query, 1)

  def to_dict(self):
    arrays = ("relevant", "irrelevant", "squares", "answered")
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return fields | {n: fields[n].tolist() for n in arrays} | {"levels": LEVELS.tolist()}

  @classmethod
  def from_dict(cls, fields):
    fields = dict(fields)
    if not np.array_equal(fields.pop("levels"), LEVELS):
      raise ValueError("its counts are at other levels")
    for name in ("relevant", "irrelevant", "answered"):
      fields[name] = np.asarray(fields[name], np.int64)
      if fields[name].shape != LEVELS.shape:
        raise ValueError(f"{name} has {fields[name].shape} counts, not {LEVELS.shape}")
    return cls(**fields | {"squares": np.asarray(fields["squares"], np.float64)})


def collect(relevant, irrelevant, group, images, scales, positives) -> Counts:
  """int [Q, L] pairs of each query from each level on, its group [Q] -> Counts."""
  _, group = np.unique(group, return_inverse=True)
  r, t = np.zeros((2, group.max() + 1, len(LEVELS)))
  np.add.at(r, group, relevant)
  np.add.at(t, group, relevant + irrelevant)
  return Counts(
    scales=scales,
    images=images,
    queries=len(relevant),
    positives=positives,
    relevant=relevant.sum(axis=0, dtype=np.int64),
    irrelevant=irrelevant.sum(axis=0, dtype=np.int64),
    squares=np.stack([(r * r).sum(0), (r * t).sum(0), (t * t).sum(0)]),
    answered=((relevant + irrelevant) > 0).sum(axis=0, dtype=np.int64),
  )
