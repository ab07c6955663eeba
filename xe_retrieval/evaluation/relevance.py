"""Which images are relevant to which query: from the best source there is, always named.

truth      the caption is true of the image: known for drawn scenes
people     people say so: judgements, of some of the queries
captions   an image's own captions say the same as the query, as a sentence encoder has it
pairing    the caption was written for the image: the paper's, known for every data set
"""

import csv
import dataclasses
import functools
import importlib.resources
import json
import pathlib
from collections.abc import Callable

import numpy as np

from xe_retrieval.data import shapes
from xe_retrieval.evaluation import score_tiles

MEANING = {
  "truth": "the caption is true of the image",
  "people": "people find that the caption describes the image",
  "captions": "the image has a caption that says the same",
  "pairing": "the caption was written for the image",
  "words": "the image has captions with all of these words",  # see calibration/keywords.py
}
# Cosine of all-MiniLM-L6-v2 from which two captions say the same: the best F1 against the
# human-verified pairs of ECCV Caption (python -m benchmarks.caption_relevance).
SAME = 0.7
PACKED = 2**33  # pairs whose relevance by captions is kept in memory, a bit each
PEOPLE_AGREE = 3.0  # grades of a judgements file from which a pair is relevant, if it has any


@dataclasses.dataclass(frozen=True)
class Relevance:
  """One source. `matrix(rows, part)` is bool [q, n] for queries `rows` and a part of the gallery.

  Part 0 are the images of the data set, the others its distractors.
  """

  name: str  # a key of MEANING
  matrix: Callable[[np.ndarray, int], np.ndarray]
  queries: np.ndarray  # int [Q'], the queries it knows about
  parts: int  # of the gallery that it knows about, from the first on


def sources(pairs, distractors=(), judgements=None, same_captions=None) -> list[Relevance]:
  """Every source there is for these data, best first.

  `judgements` are those of `read_judgements`, `same_captions` a sentence encoder.
  """
  gallery = [pairs.images, *distractors]
  found = [_truth(pairs, gallery), _people(pairs, judgements)]
  found += [_captions(pairs, gallery, same_captions), _pairing(pairs, gallery)]
  return [source for source in found if source]


def scored(pairs, gallery, relevance: Relevance, what=""):
  """Yields (rows [q], scores float32 [q, N], relevant bool [q, N]) over all queries it knows."""
  size = sum(len(part.vectors) for part in gallery)
  rows_at_once = max(1, min(256, 2**24 // size))
  for span in score_tiles.progress(score_tiles.spans(len(relevance.queries), rows_at_once), what):
    rows = relevance.queries[span]
    scores = [score_tiles.product(pairs.text[rows], part.vectors) for part in gallery]
    relevant = [relevance.matrix(rows, i) for i in range(len(gallery))]
    yield rows, np.concatenate(scores, axis=1), np.concatenate(relevant, axis=1)


def read_judgements(path: str) -> dict[str, set[str]]:
  """{caption_id: images that people find right}; `eccv` is ECCV Caption, `cxc` CxC, else a table.

  A CSV, TSV or JSONL file with caption_id, image and optionally grade: without grades every row is
  a right pair, with grades those from PEOPLE_AGREE on.
  """
  if path in ("eccv", "cxc"):
    return _read_coco(path)
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(f"--relevance={path}: there is no such file")
  right = {}
  for number, row in _rows(file):
    try:
      grade, caption, image = row.get("grade"), row["caption_id"], row["image"]
      if caption is None or image is None:
        raise KeyError
      agreed = grade in (None, "") or float(grade) >= PEOPLE_AGREE
    except (AttributeError, KeyError, ValueError, TypeError):
      raise ValueError(
        f"{path}:{number}: expected caption_id, image and optionally grade (a number)"
      ) from None
    images = right.setdefault(str(caption), set())
    if agreed:
      images.add(str(image))
  if not right:
    raise ValueError(f"{path} holds no judgements")
  return right


def _rows(file):
  """(line, {column: value}) of a CSV, TSV or JSONL file; a line that is no JSON as None."""
  with file.open(encoding="utf-8", newline="") as lines:
    if file.suffix == ".jsonl":
      for number, line in enumerate(lines, 1):
        if line.strip():
          try:
            yield number, json.loads(line)
          except ValueError:
            yield number, None
    else:
      reader = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
      for row in reader:
        yield reader.line_num, row


def _read_coco(name):
  """COCO's image ids are numbers; data sets here name images 000000123456.jpg."""
  try:
    data = importlib.resources.files("eccv_caption") / "data" / f"{name}_caption_to_image.json"
    right = json.loads(data.read_text())
  except ModuleNotFoundError:
    raise ValueError(f"--relevance={name} needs a package: pip install eccv_caption") from None
  return {caption: {f"{int(i):012d}.jpg" for i in images} for caption, images in right.items()}


def _pairing(pairs, gallery):
  def matrix(rows, part):
    out = np.zeros((len(rows), len(gallery[part].vectors)), bool)
    if part == 0:
      out[np.arange(len(rows)), pairs.image_of_text[rows]] = True
    return out

  return Relevance("pairing", matrix, np.arange(len(pairs.text)), len(gallery))


def _truth(pairs, gallery):
  known = _leading(part.scenes is not None for part in gallery)
  if not known:
    return None

  def matrix(rows, part):
    return shapes.relevance([pairs.captions[q] for q in rows], gallery[part].scenes)

  return Relevance("truth", matrix, np.arange(len(pairs.text)), known)


def _people(pairs, judgements):
  if judgements is None:
    return None
  if pairs.caption_ids is None or pairs.images.names is None:
    raise ValueError("judgements need a data set that knows its image names and caption ids")
  place = {name: m for m, name in enumerate(pairs.images.names)}
  right = {
    q: [place[name] for name in judgements[caption] if name in place]
    for q, caption in enumerate(pairs.caption_ids)
    if caption in judgements
  }
  queries = np.array([q for q, images in right.items() if images], np.int64)
  if not queries.size:
    raise ValueError(
      "none of the judged captions and images is in the data set; the names there are like "
      f"{pairs.caption_ids[0]!r} and {pairs.images.names[0]!r}"
    )

  def matrix(rows, part):
    out = np.zeros((len(rows), len(pairs.images.vectors)), bool)
    for i, q in enumerate(rows):
      out[i, right[q]] = True
    return out

  return Relevance("people", matrix, queries, 1)


def _captions(pairs, gallery, encode):
  known = _leading(part.captions is not None and all(part.captions) for part in gallery)
  if encode is None or not known:
    return None
  asked = encode(pairs.captions)  # [Q, W]
  texts = [[c for captions in part.captions for c in captions] for part in gallery[:known]]
  columns = [encode(part) for part in texts]  # by part: an encoder may remember what it gave
  first = [np.cumsum([0] + [len(c) for c in part.captions])[:-1] for part in gallery[:known]]

  def compare(rows, part):
    alike = asked[rows] @ columns[part].T  # [q, captions of the part]
    out = np.maximum.reduceat(alike, first[part], axis=1) >= SAME
    if part == 0:
      out[np.arange(len(rows)), pairs.image_of_text[rows]] = True
    return out

  @functools.cache
  def packed(part):  # every figure asks for all pairs again: a bit for each is kept
    spans = score_tiles.spans(len(pairs.text), 256)
    spans = score_tiles.progress(spans, "captions that say the same")
    blocks = [compare(np.arange(s.start, s.stop), part) for s in spans]
    return np.concatenate([np.packbits(block, axis=1) for block in blocks])

  def matrix(rows, part):
    count = len(gallery[part].vectors)
    if len(pairs.text) * count > PACKED:
      return compare(rows, part)
    return np.unpackbits(packed(part)[rows], axis=1, count=count).astype(bool)

  return Relevance("captions", matrix, np.arange(len(pairs.text)), known)


def _leading(flags):
  """How many are true before the first that is not."""
  count = 0
  for flag in flags:
    if not flag:
      break
    count += 1
  return count
