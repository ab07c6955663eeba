"""Batches of a re-ranker's training: captions, the images of their candidate lists, and the lists.

Batch number n is a function of (seed, n), as everywhere: pipeline.choice chooses the captions. Each
brings its own image and config.hard of its mined ones, drawn anew every epoch, into a pool that all
captions of the batch share; the rest of its list of config.candidates are those of the pool that
the first stage scores highest for it.
"""

import dataclasses

import numpy as np

from xe_retrieval.data import pipeline
from xe_retrieval.reranking import token_tables
from xe_retrieval.reranking.first_stage import Split, scores_of


@dataclasses.dataclass(frozen=True)
class Batches:
  """The batches of one process; rows of `pool` of all processes are those of the global batch."""

  split: Split
  mined: np.ndarray  # int32 [Q, at least config.hard]: rows of wrong images
  config: object
  process: int = 0
  processes: int = 1

  def __call__(self, start=0):
    """Yields batches `start`, … of this process's rows.

    text    float16 [B, T, width], known  bool [B, T]
    image   float16 [B · (1 + hard), places, width]: the pool
    rows    int32 [B, K]: each list in the global pool, the caption's own image first
    first   float32 [B, K]: scores of the first stage
    negative  bool [B, K]: the image is a wrong one
    """
    choose = pipeline.choice(len(self.split.source), self.config)
    for step in range(start, self.config.steps):
      yield self._batch(*choose(step))

  def _batch(self, records, draws):
    split = self.split
    captions = split.source.column("text_ids")
    captions = captions.starts[records] + draws % captions.counts[records]  # [B] of all processes
    own = split.image_of_record[records]
    pool = np.concatenate([own[:, None], self._drawn(captions, draws)], axis=1)  # [B, 1 + hard]
    rows, first, negative = self._lists(captions, pool)
    size = len(records) // self.processes
    mine = slice(self.process * size, (self.process + 1) * size)
    length = token_tables.padded_length(split.tokens.lengths[captions])
    text, known = split.tokens.padded(captions[mine], length)
    return {
      "text": text,
      "known": known,
      "image": split.image_tokens(pool[mine].reshape(-1)),
      "rows": rows[mine],
      "first": first[mine],
      "negative": negative[mine],
    }

  def _drawn(self, captions, draws):  # -> int [B, hard], without repetitions
    count = self.mined.shape[1]
    random = [np.random.default_rng(int(draw)) for draw in draws]
    chosen = np.array([r.permutation(count)[: self.config.hard] for r in random])
    return np.take_along_axis(self.mined[captions], chosen.reshape(len(draws), -1), axis=1)

  def _lists(self, captions, pool):
    """-> int32 [B, K] rows of the pool, float32 [B, K], bool [B, K]."""
    pairs, images = self.split.pairs, pool.reshape(-1)
    scores = pairs.text[captions] @ pairs.image[images].T  # [B, N]
    negative = self.split.owners.negative(captions, images)
    # An image that is there twice counts once in a list: its first copy, or the caption's own.
    at = np.arange(pool.size).reshape(pool.shape)
    _, firsts, copies = np.unique(images, return_index=True, return_inverse=True)
    wanted = np.where(negative & (firsts[copies] == np.arange(pool.size)), scores, -np.inf)
    drawn = firsts[copies[at[:, 1:]]]
    np.put_along_axis(wanted, drawn, np.inf, axis=1)  # before all others
    count = self.config.candidates - 1
    chosen = np.argsort(-wanted, axis=1, kind="stable")[:, :count]
    rows = np.concatenate([at[:, :1], chosen], axis=1)
    negative = np.take_along_axis(negative & (wanted > -np.inf), rows, axis=1)
    negative[:, 0] = False
    first = scores_of(pairs.text[captions], pairs.image[images], rows)
    return rows.astype(np.int32), first, negative
