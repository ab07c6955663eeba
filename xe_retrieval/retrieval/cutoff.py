"""thresholds.json: the cosine to cut at for a wanted precision, and the precision of a cosine.

Evaluation writes it next to the checkpoints; search and serve read it. Precision at a score is that
of returning every pair with at least this score, over all queries of the evaluation. It depends on
the gallery: the file says on which data it was measured.
"""

import dataclasses
import json
import pathlib

import numpy as np

NAME = "thresholds.json"
STEPS = 500  # precisions at which the curve is stored: 0.002, 0.004, … 1
SUPPORT = 20  # thresholds that return fewer pairs say nothing about precision
WHAT = {
  "pairing": "the caption was written for the image",
  "truth": "the caption is true of the image",
}


@dataclasses.dataclass(frozen=True)
class Cutoffs:
  """A curve of rising thresholds and precisions, and what it was measured on."""

  path: pathlib.Path
  about: dict  # the file without its curves
  relevance: str  # a key of WHAT
  threshold: np.ndarray  # float64 [T], rising; the first is -1
  precision: np.ndarray  # float64 [T], rising: of all pairs with at least this score
  recall: np.ndarray  # float64 [T]
  returned: np.ndarray  # int64 [T], pairs

  @property
  def default(self) -> float:
    """The precision at the best F1."""
    f1 = self.precision * self.recall / np.maximum(self.precision + self.recall, 1e-12)
    return float(self.precision[np.argmax(f1)])

  def at_precision(self, precision: float) -> float:
    """The lowest threshold with at least that precision."""
    row = np.searchsorted(self.precision, precision)
    if row == len(self.precision):
      raise ValueError(
        f"no threshold has precision {precision:g} on {self.measured_on()}; "
        f"the highest is {self.precision[-1]:.3f}, at scores of {self.threshold[-1]:.3f} and more"
      )
    return float(self.threshold[row])

  def precision_at(self, scores) -> np.ndarray:
    """[...] -> float64 [...]: what to expect of returning everything from this score on."""
    row = np.searchsorted(self.threshold, scores, side="right") - 1
    return self.precision[np.maximum(row, 0)]

  def measured_on(self) -> str:
    about = self.about
    size = f"{about['queries']:,} captions × {about['images']:,} images"
    return f"{about['dataset']} {about['split']} ({size})"


def points(curve) -> dict:
  """precision_recall.Curve -> the lowest threshold for each of STEPS precisions, JSON-ready.

  The first row is -1, where everything is returned.
  """
  enough = curve.returned >= SUPPORT
  precision = np.maximum.accumulate(curve.precision[enough][::-1])  # rising with the threshold
  base = curve.positives / curve.pairs
  wanted = np.arange(1, STEPS + 1) / STEPS
  rows = np.searchsorted(precision, wanted[wanted > base])
  rows = np.unique(rows[rows < len(precision)])
  rows = rows[precision[rows] > base]  # rows of the rising curve
  at = np.flatnonzero(enough)[::-1][rows]  # and of the given one
  return {
    "positives": int(curve.positives),
    "threshold": [-1.0, *map(float, curve.thresholds[at])],
    "precision": [base, *map(float, precision[rows])],
    "recall": [1.0, *map(float, curve.recall[at])],
    "returned": [int(curve.pairs), *map(int, curve.returned[at])],
  }


def write(path, about: dict, targets: list[dict], curves: dict[str, dict]) -> None:
  """Whole or not at all. `curves` are `points` by a key of WHAT."""
  curves = {name: {"relevant": WHAT[name]} | curve for name, curve in curves.items()}
  content = about | {"targets": targets, "curves": curves}
  path = pathlib.Path(path)
  part = path.with_name(path.name + ".part")
  part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
  part.replace(path)


def read(path) -> Cutoffs:
  """The curve of known truth, where the data know it, else that of the pairing."""
  path = pathlib.Path(path)
  try:
    content = json.loads(path.read_text())
    curves = content.pop("curves")
    name = next(n for n in ("truth", "pairing") if n in curves)
    threshold, precision, recall = (
      np.asarray(curves[name][key], np.float64) for key in ("threshold", "precision", "recall")
    )
    returned = np.asarray(curves[name]["returned"], np.int64)
    if not len(threshold) == len(precision) == len(recall) == len(returned) > 0:
      raise ValueError("its columns differ in length")
    if (np.diff(threshold) <= 0).any() or (np.diff(precision) <= 0).any():
      raise ValueError("its curve does not rise")
    _ = [content[key] for key in ("dataset", "split", "queries", "images", "model")]
  except (KeyError, TypeError, ValueError, StopIteration, AttributeError) as e:
    raise ValueError(
      f"{path} is no {NAME} that this version reads ({type(e).__name__}: {e}); "
      "python -m xe_retrieval.evaluate --workdir=… writes it anew"
    ) from e
  return Cutoffs(path, content, name, threshold, precision, recall, returned)


def of_model(directory, fingerprint: str) -> Cutoffs | None:
  """Those in a workdir or exported directory, if there are any and of this very model."""
  path = pathlib.Path(directory).expanduser() / NAME
  found = read(path) if path.is_file() else None
  return found if found and found.about["model"] == fingerprint else None
