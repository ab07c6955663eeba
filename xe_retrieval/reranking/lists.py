"""Captions of a split, their candidates of the first stage, read by a joint encoder."""

import functools
import time

import numpy as np

from xe_retrieval.evaluation import ranks, score_tiles
from xe_retrieval.reranking import first_stage
from xe_retrieval.reranking.first_stage import Split
from xe_retrieval.reranking.measures import Lists
from xe_retrieval.reranking.scorer import Scorer, blocks
from xe_retrieval.training import processes

GRIDS = 256  # images whose tokens are read from disk at once


def read(split: Split, scorer: Scorer, count: int | None, captions=None):
  """-> Lists of these captions (int [Q], by default all), pairs per second.

  All processes share the captions. `count` None: all images are candidates.
  """
  pairs = split.pairs
  captions = np.arange(len(pairs.text)) if captions is None else captions
  text, own = pairs.text[captions], pairs.image_of_text[captions]
  count = min(count or len(pairs.image), len(pairs.image))
  images = first_stage.candidates(text, pairs.image, count)
  scores = first_stage.scores_of(text, pairs.image, images)
  logits, speed = _logits(split, scorer, captions, images, scores, compress(split, scorer))
  before = ranks.text_to_image(text, pairs.image, own)
  first = np.float32(scorer.config.scale) * scores
  return Lists(images, first, logits, images == own[:, None], before, len(pairs.image)), speed


def compress(split: Split, scorer: Scorer):
  """float16 [M, tokens, width] of all images; the processes share them."""
  count = len(split.record_of_image)
  spans = [np.arange(i, min(i + GRIDS, count)) for i in range(0, count, GRIDS)]
  out = np.zeros((count, *scorer.image_shape), np.float16)
  for rows in processes.share(score_tiles.progress(spans, "compressing images")):
    out[rows] = np.concatenate(list(scorer.compress([split.image_tokens(rows)])))
  return processes.total(out)


def _logits(split, scorer, captions, images, scores, compressed):
  """-> float32 [Q, K], pairs per second of this process, without compiling."""
  logits = np.zeros(images.shape, np.float32)
  tokens = split.tokens.of(captions)
  shapes, seconds, done = set(), 0.0, 0
  todo = processes.share(blocks(tokens.lengths, images.shape[1]))
  for block in score_tiles.progress(todo, "reading pairs"):
    read = functools.partial(scorer.block, tokens, compressed, images, scores, block)
    if block.shape not in shapes:
      shapes.add(block.shape)
      read()  # compiles
    begun = time.perf_counter()
    logits[block.at] = read()
    seconds += time.perf_counter() - begun
    done += block.at[0].size * block.at[1].size
  return processes.total(logits), done / seconds if done else None
