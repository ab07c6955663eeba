"""How many relevant and irrelevant pairs lie above each log-odds, and what follows for any size.

The counts are those of a gallery of M images. In a collection of N images from the same source each
caption still has its own image, once, and as large a share of the other images is relevant or not:

    relevant = own + others · N/M        irrelevant · N/M

Under the pairing there are no others: as many images are relevant, however many there are. So the
odds of a pair stay as they are, or shrink by up to M/N, the more often pairs of its log-odds are
own ones. A smaller collection may lack the caption's own image: there all counts scale by N/M, and
the odds stay.
"""

import dataclasses

import numpy as np

from xe_retrieval.calibration import bounds

LEVELS = np.round(np.arange(-12, 12.001, 0.05), 2)  # log-odds at which pairs are counted
SUPPORT = 30  # independent pairs: what is worth fewer says too little about precision
WINDOW = 10  # levels to either side among which own pairs are told from others: ± 0.5
CONFIDENCE = 0.9


@dataclasses.dataclass(frozen=True)
class Counts:
  """Pairs with z ≥ LEVELS, and the sums over groups that their uncertainty follows from.

  A group is an image: the pairs of all its captions, and of all other captions with it. They are
  not independent: captions of an image ask for the same, some images are near to every caption.
  """

  images: int  # M
  queries: int
  positives: int  # relevant pairs in all
  relevant: np.ndarray  # int64 [L], falling
  own: np.ndarray  # int64 [L], falling: those of a caption and its own image
  irrelevant: np.ndarray  # int64 [L], falling
  squares: np.ndarray  # float64 [4, L]: Σ r², Σ r·t, Σ t² over groups, t = r + irrelevant; and Σ t²
  # of the captions of each image alone
  answered: np.ndarray  # int64 [L]: queries with at least one pair

  def shifts(self, images: int):
    """float64 [L]: what to add to log-odds of LEVELS in a collection of that many images."""
    own, relevant = _around(self.own), _around(self.relevant)
    # Too few relevant pairs around a level: those from there on, or else all.
    for more in (self.own, self.relevant), (self.own[0], self.relevant[0]):
      few = relevant < SUPPORT
      own, relevant = np.where(few, more[0], own), np.where(few, more[1], relevant)
    share = own / np.maximum(relevant, 1)
    scale = share * self._scale_own(images) + (1 - share) * images / self.images
    return np.log(scale / self._scale_irrelevant(images))

  def precision(self, images: int):
    """Of everything from each level on, in a collection of that many images; NaN: nothing."""
    true = self._relevant(images)
    all_ = true + self.irrelevant * self._scale_irrelevant(images)
    return np.divide(true, all_, out=np.full(len(true), np.nan), where=all_ > 0)

  def lower_bound(self, images: int, confidence: float = CONFIDENCE, again: bool = False):
    """One-sided lower confidence bound of `precision`; 0 where nothing can be said."""
    returned = self.relevant + self.irrelevant
    low = bounds.precision(self.relevant, returned, self.squares, confidence, again)
    factor = self._relevant(images) / np.maximum(self.relevant, 1) / self._scale_irrelevant(images)
    return _times_odds(low, factor)

  def _enough(self):
    returned = self.relevant + self.irrelevant
    return bounds.worth(self.relevant, returned, self.squares) >= SUPPORT

  def _reachable(self, images, confidence, again):
    """The bound if all pairs were relevant ones: which targets a level can promise at all."""
    returned = self.relevant + self.irrelevant
    low = bounds.precision(returned, returned, self.squares, confidence, again)
    return _times_odds(low, self._scale_own(images) / self._scale_irrelevant(images))

  def wrong(self, images: int):
    """Irrelevant images that a query gets from each level on."""
    return self.irrelevant * self._scale_irrelevant(images) / self.queries

  def returned(self, images: int):
    """Images that a query gets from each level on."""
    return self.wrong(images) + self._relevant(images) / self.queries

  def at_precision(self, target: float, images: int, guarantee: bool = False) -> float | None:
    """The lowest level down to which every level keeps the target; None if none does.

    Going down from the first level with enough pairs to reach the target at all, and stopping at
    the first failure, keeps the confidence of a single test although many levels are tried
    (fixed-sequence testing). Without `guarantee`, the precision is as often above the target as
    below; with it, in CONFIDENCE of all cases above, also among as many results again.
    """
    promise = (CONFIDENCE, True) if guarantee else (0.5, False)
    kept = self.lower_bound(images, *promise)
    enough = np.flatnonzero(self._enough() & (self._reachable(images, *promise) >= target))
    if not enough.size:
      return None
    last = None
    for level in range(enough[-1], -1, -1):
      if not kept[level] >= target:
        break
      last = level
    return None if last is None else float(LEVELS[last])

  def at_wrong(self, most: float, images: int) -> float | None:
    """The lowest level at which a query gets at most so many irrelevant images in the mean."""
    fine = np.flatnonzero(self.wrong(images) <= most)
    return float(LEVELS[fine[0]]) if fine.size else None

  def expect(self, level: float, images: int) -> dict:
    """What returning everything from a level on gives in a collection of that many images."""
    i = int(np.clip(np.searchsorted(LEVELS, level - 1e-9), 0, len(LEVELS) - 1))
    precision, low = self.precision(images)[i], self.lower_bound(images)[i]
    enough = self._enough()[i]
    return {
      "precision": float(precision) if enough and np.isfinite(precision) else None,
      "precision_at_least": float(low) if enough else None,
      "recall": float(self.relevant[i] / max(self.positives, 1)),
      "results_per_query": float(self.returned(images)[i]),
      "wrong_per_query": float(self.wrong(images)[i]),
    }

  def _relevant(self, images):
    """Relevant pairs from each level on in a collection of that many images."""
    own = self.own * self._scale_own(images)
    return own + (self.relevant - self.own) * (images / self.images)

  def _scale_own(self, images):
    return min(1.0, images / self.images)

  def _scale_irrelevant(self, images):
    own, relevant = self.own[0] / self.queries, self.positives / self.queries
    there = own * self._scale_own(images) + (relevant - own) * images / self.images
    return max(images - there, 1e-9) / max(self.images - relevant, 1e-9)

  def to_dict(self):
    arrays = ("relevant", "own", "irrelevant", "squares", "answered")
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return fields | {n: fields[n].tolist() for n in arrays} | {"levels": LEVELS.tolist()}

  @classmethod
  def from_dict(cls, fields):
    fields = dict(fields)
    if not np.array_equal(fields.pop("levels"), LEVELS):
      raise ValueError("its counts are at other levels")
    for name in ("relevant", "own", "irrelevant", "answered"):
      fields[name] = np.asarray(fields[name], np.int64)
      if fields[name].shape != LEVELS.shape:
        raise ValueError(f"{name} has {fields[name].shape} counts, not {LEVELS.shape}")
    fields["squares"] = np.asarray(fields["squares"], np.float64)
    if fields["squares"].shape != (4, len(LEVELS)):
      raise ValueError("its squares have another shape")
    if any(not isinstance(fields[n], int) for n in ("images", "queries", "positives")):
      raise ValueError("images, queries and positives should be whole numbers")
    if min(fields["images"], fields["queries"]) < 1:
      raise ValueError("it was made of no images or queries")
    return cls(**fields)


def _around(counts):
  """Pairs from each level on [L] -> pairs around each level [L]."""
  at = np.arange(len(LEVELS))
  low, high = (np.clip(at + d, 0, at[-1]) for d in (-WINDOW, WINDOW))
  return counts[low] - counts[high]


def _times_odds(p, factor):
  odds = p / np.maximum(1 - p, 1e-12) * factor
  return odds / (1 + odds)


def collect(relevant, own, irrelevant, group, images, positives, columns=None) -> Counts:
  """int [Q, L] pairs of each query from each level on, the image it belongs to [Q] -> Counts.

  `columns` is int [2, M, L]: relevant and all pairs of each image with captions of others; None:
  the images are always the same ones, only queries are drawn.
  """
  r, t = np.zeros((2, group.max() + 1 if columns is None else columns.shape[1], len(LEVELS)))
  np.add.at(r, group, relevant)
  np.add.at(t, group, relevant + irrelevant)
  captions, twice = (t * t).sum(0), 0
  if columns is not None:
    r, t = r + columns[0], t + columns[1]
    twice = columns.sum(axis=1)[[0, 0, 1]]  # Σ y², Σ y, Σ 1 of pairs that are in two groups
  return Counts(
    images=images,
    queries=len(relevant),
    positives=positives,
    relevant=relevant.sum(axis=0, dtype=np.int64),
    own=own.sum(axis=0, dtype=np.int64),
    irrelevant=irrelevant.sum(axis=0, dtype=np.int64),
    squares=np.stack([*(np.stack([r * r, r * t, t * t]).sum(axis=1) - twice), captions]),
    answered=((relevant + irrelevant) > 0).sum(axis=0, dtype=np.int64),
  )
