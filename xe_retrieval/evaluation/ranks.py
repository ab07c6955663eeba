"""Exact ranks of the right answer among any number of documents, without any top-k.

The rank is the number of documents that outscore the right one: 0 is first. Scores are float32
dot products; those that are too close to the right one's to be told apart in float32 are compared
in float64. Ties: documents with equal scores keep their order, images before distractors, as in a
stable sort; so a model that gives every pair the same score is right once in M, not always.
"""

import numpy as np

from xe_retrieval.evaluation import bootstrap, pair_counts, score_tiles

AT = (1, 5, 10, 100)  # the k of Recall@k


def text_to_image(text, image, image_of_text, distractors=None, devices=None):
  """[Q, D], [M, D], int [Q], [N, D] or a list of such -> int64 [Q]: rank of each caption's image.

  On the CPU in NumPy, on accelerators (or the `devices` given) in JAX.
  """
  data = score_tiles.pairing(text, image, image_of_text)
  matches = pair_counts.Matches(*data, devices)
  rank = matches.count(returned=False).outscored
  if distractors is not None:
    more = score_tiles.parts(data[1], distractors)[1:]
    rank = rank + matches.count(more, returned=False).outscored
  return rank


def image_to_text(text, image, image_of_text, devices=None):
  """[Q, D], [M, D], int [Q] -> int64 [images with captions]: rank of the first right caption.

  Any caption of the image is right. Images without captions ask no question and are left out.
  """
  text, image, image_of_text = score_tiles.pairing(text, image, image_of_text)
  scores = pair_counts.own_scores(text, image, image_of_text)
  order = np.lexsort((-scores, image_of_text))  # by image, its best caption first; stable
  asked, first = np.unique(image_of_text[order], return_index=True)
  matches = pair_counts.Matches(image[asked], text, order[first], devices)
  return matches.count(returned=False).outscored


def recall_at(ranks, k):
  """int [Q] -> share of queries, in percent, whose right answer is among the first k."""
  return 100.0 * float(np.mean(ranks < k))


def median(ranks):
  """int [Q] -> median rank, counted from 1 as the field does."""
  return float(np.median(ranks)) + 1


def summary(ranks):
  """int [Q] -> Recall@1/5/10/100 in percent and the median rank (1 = first)."""
  return {f"recall@{k}": recall_at(ranks, k) for k in AT} | {"median_rank": median(ranks)}


def intervals(draws, ranks):
  """float32 [S, Q], int [Q] -> [low, high] for each entry of `summary`."""
  recall = {f"recall@{k}": bootstrap.mean(draws, 100.0 * (ranks < k)) for k in AT}
  return recall | {"median_rank": bootstrap.median(draws, ranks + 1)}
