"""Queries worth looking at, with their first images: the paper's figure, for one's own data."""

import base64
import io

import numpy as np
from PIL import Image

QUERIES, RESULTS = 4, 6
PIXELS = 160  # longer side of a picture on the page


def sections(pairs, evaluation, threshold):
  """Pairs, Evaluation, cosine -> [{title, text, queries}] for the page; no caption twice."""
  ranks, top = evaluation.ranks, evaluation.top
  own = np.einsum("qd,qd->q", pairs.text, pairs.image[pairs.image_of_text])
  confident = top >= threshold
  not_true = ", and the caption is not true of it" if pairs.relevant else ""
  out, shown = [], set()
  for title, text, order, allowed, wrong in (
    (
      "Found, and sure of it",
      "The right image is first, with the highest scores of all.",
      np.argsort(-own),
      ranks == 0,
      False,
    ),
    (
      "Nothing relevant",
      "The lowest best scores: a calibrated model can say that it has no answer. Such captions "
      "tend to be vague.",
      np.argsort(top),
      ~confident,
      False,
    ),
    (
      "Wrong, and sure of it",
      f"Another image is first, above the threshold{not_true}.",
      np.argsort(-top),
      confident & (ranks > 0),
      True,
    ),
    (
      "Lost",
      "Of the other captions, those whose right image is furthest down the list.",
      np.argsort(-ranks, kind="stable"),
      ranks >= RESULTS,
      False,
    ),
  ):
    chosen = _pick(pairs, order[allowed[order]], shown, wrong)
    if chosen:
      queries = [_query(pairs, q, ranks[q], threshold) for q in chosen]
      out.append({"title": title, "text": text, "queries": queries})
  return out


def _pick(pairs, order, shown, wrong):
  """The first few queries whose captions are not in `shown`, which they join.

  `wrong`: only those whose first image the caption is not true of, where that is known.
  """
  chosen = []
  for q in order:
    if pairs.captions[q] in shown:
      continue
    if wrong and pairs.relevant is not None:
      first = int(np.argmax(pairs.image @ pairs.text[q]))
      if pairs.relevant(np.array([q]))[0, first]:
        continue
    chosen.append(int(q))
    shown.add(pairs.captions[q])
    if len(chosen) == QUERIES:
      break
  return chosen


def _query(pairs, q, rank, threshold):
  """One caption, its first images, and the right one at the end if it is not among them."""
  scores = pairs.image @ pairs.text[q]  # [M]
  first = np.argsort(-scores, kind="stable")[:RESULTS]
  right = pairs.image_of_text[q]
  relevant = pairs.relevant(np.array([q]))[0] if pairs.relevant is not None else None

  def result(m):
    return {
      "picture": _data_uri(pairs.picture(int(m))),
      "score": float(scores[m]),
      "above": bool(scores[m] >= threshold),
      "right": bool(m == right),
      "also_true": bool(relevant is not None and relevant[m] and m != right),
    }

  return {
    "caption": pairs.captions[q],
    "rank": int(rank) + 1,
    "results": [result(m) for m in first],
    "missing": None if right in first else result(right),
  }


def _data_uri(encoded):
  """Picture file -> data: address, made small; a picture that is small already stays as it is."""
  picture = Image.open(io.BytesIO(encoded))
  kind = (picture.format or "png").lower()
  if max(picture.size) > PIXELS:
    picture = picture.convert("RGB")
    picture.thumbnail((PIXELS, PIXELS))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=82)
    encoded, kind = out.getvalue(), "jpeg"
  return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
