"""Does "an image has a caption that says the same" agree with people? Against ECCV Caption.

  pip install eccv_caption
  python -m benchmarks.caption_relevance --captions=coco_captions.tsv --encoder=DIR_or_id

Takes the captions of the validation and test photos of a table (split, image, caption_id, caption;
ids are COCO's) and the human-verified right images of ECCV Caption, leaves out each caption's own
photo, and prints precision and recall of calling an image relevant from a cosine on, and the cosine
with the best F1, which is evaluation.relevance.SAME. People have judged candidates only, not all
pairs: a pair nobody was shown counts as wrong here, so precision is underestimated.
"""

import argparse
import csv

import numpy as np

from xe_retrieval.evaluation import relevance
from xe_retrieval.towers import sentence_encoder


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--captions", required=True)
  parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2")
  given = parser.parse_args()
  right = relevance.read_judgements("eccv")
  with open(given.captions, encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
  rows = sorted((r for r in rows if r["split"] != "train"), key=lambda r: r["image"])
  images, owner = np.unique([r["image"] for r in rows], return_inverse=True)
  asked = [i for i, r in enumerate(rows) if r["caption_id"] in right]
  vectors = sentence_encoder.load(given.encoder)([r["caption"] for r in rows])
  first = np.searchsorted(owner, np.arange(len(images)))
  alike = np.maximum.reduceat(vectors[asked] @ vectors.T, first, axis=1)  # [Q, images]
  people = np.stack([np.isin(images, list(right[rows[i]["caption_id"]])) for i in asked])
  other = np.arange(len(images)) != owner[asked][:, None]  # the caption's own photo is no news
  score, yes = alike[other], people[other]
  order = np.argsort(-score)
  hits, returned = np.cumsum(yes[order]), np.arange(1, len(order) + 1)
  precision, recall = hits / returned, hits / yes.sum()
  f1 = 2 * hits / (returned + yes.sum())
  print(
    f"{len(asked):,} captions × {len(images):,} photos, {yes.sum() / len(asked):.1f} right ones"
  )
  print(f"average precision {np.sum(precision * yes[order]) / yes.sum():.3f}")
  best = int(np.argmax(f1))
  for cosine in (0.5, 0.6, relevance.SAME, 0.8, float(score[order][best])):
    i = max(int(np.searchsorted(-score[order], -cosine)) - 1, 0)
    mark = "  best F1" if cosine == float(score[order][best]) else ""
    found = f"precision {precision[i]:.3f}, recall {recall[i]:.3f}, F1 {f1[i]:.3f}"
    print(f"cosine ≥ {cosine:.3f}: {found}, {returned[i] / len(asked):.1f} a caption{mark}")


if __name__ == "__main__":
  main()
