"""Queries worth looking at, with their first images: the paper's figure, for one's own data."""

import base64
import io

import numpy as np
from PIL import Image

QUERIES, RESULTS = 4, 6
PIXELS = 160  # longer side of a picture on the page


def sections(pairs, evaluation, threshold):
  """Pairs, Evaluation, cosine -> [{title, text, queries}] for the page."""
  ranks, top = evaluation.ranks, evaluation.top
  own = np.einsum("qd,qd->q", pairs.text, pairs.image[pairs.image_of_text])
  confident = top >= threshold
  return [
    {
      "title": title,
      "text": text,
      "queries": [_query(pairs, q, ranks[q], threshold) for q in chosen],
    }
    for title, text, chosen in (
      (
        "Found, and sure of it",
        "The right image is first, with the highest scores of all.",
        _pick(pairs, np.argsort(-own), ranks == 0),
      ),
      (
        "Nothing relevant",
        "The lowest best scores: a calibrated model can say that it has no answer. "
        "Such captions tend to be vague.",
        _pick(pairs, np.argsort(top), ~confident),
      ),
      (
        "Wrong, and sure of it",
        "Another image is first, above the threshold"
        + (", and the caption is not true of it." if pairs.relevant else "."),
        _pick(pairs, np.argsort(-top), confident & (ranks > 0), wrong=True),
      ),
      (
        "Lost",
        "The right image is furthest down the list.",
        _pick(pairs, np.argsort(-ranks, kind="stable"), ranks >= RESULTS),
      ),
    )
    if len(chosen)
  ]


def _pick(pairs, order, allowed, wrong=False):
  """The first few allowed queries with different captions."""
  chosen, captions = [], set()
  for q in order[allowed[order]]:
    if pairs.captions[q] in captions:
      continue
    if wrong and pairs.relevant is not None:
      first = int(np.argmax(pairs.image @ pairs.text[q]))
      if pairs.relevant(np.array([q]))[0, first]:
        continue
    chosen.append(int(q))
    captions.add(pairs.captions[q])
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
