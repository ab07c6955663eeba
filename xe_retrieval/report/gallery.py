"""Example queries with their top images for the report, after the paper's qualitative figure."""

import base64
import dataclasses
import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from xe_retrieval.calibration.artifact import DEFAULT_PROBABILITY
from xe_retrieval.evaluation.relevance import MEANING

QUERIES, RESULTS = 4, 6
PIXELS = 160  # longer side of an image on the page


@dataclasses.dataclass(frozen=True)
class Shown:
  """The number beside an image: its probability, or its cosine if the model is not calibrated."""

  values: Callable  # int [q] queries, float [q, k] cosines -> float [q, k]
  cut: float  # results from this value on are framed
  format: Callable[[float], str]
  legend: str


def shown(pairs, best_f1, calibration=None) -> Shown:
  """Pairs, cosine with the best F1, Calibration or None -> Shown."""
  if calibration is None:
    legend = f"cosine at least {best_f1:.2f}, the threshold with the best F1"
    return Shown(lambda rows, scores: scores, best_f1, "{:.2f}".format, legend)
  images = len(pairs.image)
  meaning = calibration.best.at(images)
  queries = calibration.queries(pairs.captions, pairs.text, pairs.features)

  def probability(rows, scores):
    return meaning.probability(meaning.calibrator.logit(scores, queries[rows]), images)

  legend = f"at least {100 * DEFAULT_PROBABILITY:.0f} % probable that {MEANING[meaning.relevance]}"
  return Shown(probability, DEFAULT_PROBABILITY, lambda p: f"{100 * p:.0f} %", legend)


def sections(pairs, evaluation, source, shown):
  """Pairs, Evaluation, best Relevance, Shown -> [{title, text, queries}]; no caption twice."""
  ranks, rows = evaluation.ranks, np.arange(len(pairs.text))
  top = shown.values(rows, evaluation.top[:, None])[:, 0]
  confident = top >= shown.cut
  relevant = _relevant(source)
  other = "" if source.name == "pairing" else f"; left out where {MEANING[source.name]}"
  out, seen = [], set()
  for title, text, order, allowed, wrong in (
    (
      "Confidently right",
      "The right image is first; these have the highest scores.",
      np.argsort(-top, kind="stable"),
      ranks == 0,
      False,
    ),
    (
      "Nothing relevant",
      "No image reaches the threshold; these have the lowest best scores. Such captions tend to be "
      "vague.",
      np.argsort(top, kind="stable"),
      ~confident,
      False,
    ),
    (
      "Confidently wrong",
      f"Another image is first, above the threshold{other}.",
      np.argsort(-top, kind="stable"),
      confident & (ranks > 0),
      True,
    ),
    (
      "Missed",
      "The right image is far down the list; these, of the other captions, have it furthest down.",
      np.argsort(-ranks, kind="stable"),
      ranks >= RESULTS,
      False,
    ),
  ):
    chosen = _pick(pairs, order[allowed[order]], seen, relevant if wrong else None)
    if chosen:
      queries = [_query(pairs, q, ranks[q], shown, relevant) for q in chosen]
      out.append({"title": title, "text": text, "queries": queries})
  return out


def _relevant(source):
  """Relevance -> a function from a query to bool [M], or to None where nothing is known of it."""
  known = set() if source.name == "pairing" else set(source.queries.tolist())
  return lambda q: source.matrix(np.array([q]), 0)[0] if int(q) in known else None


def _pick(pairs, order, seen, relevant):
  """The first QUERIES queries with captions not in `seen`; adds them to `seen`.

  With `relevant`, skips queries whose top image is known to be relevant.
  """
  chosen = []
  for q in order:
    if pairs.captions[q] in seen:
      continue
    known = relevant(q) if relevant else None
    if known is not None and known[np.argmax(pairs.image @ pairs.text[q])]:
      continue
    chosen.append(int(q))
    seen.add(pairs.captions[q])
    if len(chosen) == QUERIES:
      break
  return chosen


def _query(pairs, q, rank, shown, relevant):
  """One caption, its top images, and the right one after them if it is not among them."""
  scores = pairs.image @ pairs.text[q]  # [M]
  values = shown.values(np.array([q]), scores[None])[0]
  first = np.argsort(-scores, kind="stable")[:RESULTS]
  right, known = pairs.image_of_text[q], relevant(q)

  def result(m):
    return {
      "image": _data_uri(pairs.encoded(int(m))),
      "value": shown.format(values[m]),
      "above": bool(values[m] >= shown.cut),
      "right": bool(m == right),
      "also_relevant": bool(known is not None and known[m] and m != right),
    }

  return {
    "caption": pairs.captions[q],
    "rank": int(rank) + 1,
    "results": [result(m) for m in first],
    "missing": None if right in first else result(right),
  }


def _data_uri(encoded):
  """Image file -> data: URI of at most PIXELS; a smaller image is kept unchanged."""
  image = Image.open(io.BytesIO(encoded))
  kind = (image.format or "png").lower()
  if max(image.size) > PIXELS:
    image = image.convert("RGB")
    image.thumbnail((PIXELS, PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=82)
    encoded, kind = out.getvalue(), "jpeg"
  return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
