"""Pairs with any scores: text vectors are rows of the score matrix, image vectors the identity."""

import numpy as np
import pytest
import threadpoolctl
from scipy import stats

from xe_retrieval.calibration import counts as counting
from xe_retrieval.evaluation.embedded import Images, Pairs
from xe_retrieval.evaluation.relevance import Relevance


@pytest.fixture(autouse=True, scope="module")
def one_thread():
  """Tiny products: BLAS threads would spend the time waiting for each other."""
  with threadpoolctl.threadpool_limits(1):
    yield


def own_image(queries, images):
  """int [Q]: five captions to an image."""
  return np.arange(queries) // 5 % images


def pairs_with(scores, right, name="pairing"):
  """float [Q, N], bool [Q, N] -> Pairs, gallery, Relevance with exactly these scores."""
  queries, images = scores.shape
  gallery = Images(np.eye(images, dtype=np.float32))
  own = own_image(queries, images)
  pairs = Pairs(scores.astype(np.float32), gallery, own, [""] * queries, lambda m: b"")
  source = Relevance(name, lambda rows, part: right[rows], np.arange(queries), 1)
  return pairs, [gallery], source


def two_normals(random, queries, images, share=0.0, own=True, means=(0.5, 0.2), deviation=0.1):
  """A share of the images is relevant, and the caption's own one; scores around two means."""
  right = random.random((queries, images)) < share
  right[np.arange(queries), own_image(queries, images)] = own
  scores = random.normal(np.where(right, *means), deviation)
  return np.clip(scores, -1, 1), right


def true_log_odds(score, share, means=(0.5, 0.2), deviation=0.1):
  density = [stats.norm.logpdf(score, m, deviation) for m in means]
  return density[0] - density[1] + np.log(share / (1 - share))


def counted(z, right, query, group, own=True, **about):
  """Pairs' log-odds [P], relevance [P], query [P]; group of each query [Q] -> Counts.

  The relevant images are the captions' own ones, or none of them is.
  """
  levels = len(counting.LEVELS)
  cell = np.searchsorted(counting.LEVELS, z, side="right")  # levels that the pair reaches
  shape = len(group), levels + 1
  tables = [
    np.bincount((query * shape[1] + cell)[which], minlength=shape[0] * shape[1]).reshape(shape)
    for which in (right, ~right)
  ]
  relevant, irrelevant = (t[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:] for t in tables)
  return counting.collect(relevant, relevant * own, irrelevant, group, **about)
