"""The pairs of batch number n: which records, which of their captions, which crops.

Neither TensorFlow nor JAX is imported, and `Pairs` can be pickled: worker processes use it.
"""

import concurrent.futures
import functools

import numpy as np

from xe_retrieval.data import decoding
from xe_retrieval.data.feed import examples


class Records:
  """Serialised records by index, of an `ArrayRecordDataSource`."""

  def __init__(self, source):
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices) -> list[bytes]:
    """Several at once. (`__getitems__` would start a thread for each shard, at every call.)"""
    parts = [indices[i : i + _AT_ONCE] for i in range(0, len(indices), _AT_ONCE)]
    read = lambda part: [self._source[int(i)] for i in part]  # noqa: E731
    return [record for records in _readers().map(read, parts) for record in records]


_AT_ONCE = 8  # records that one thread reads in turn


@functools.cache
def _readers():
  return concurrent.futures.ThreadPoolExecutor(8)


class Pairs:
  """Computes the rows that one process has of batch number n, all of them or some."""

  def __init__(self, records: Records, tokenizer, config, process: int = 0, processes: int = 1):
    self._records, self._tokenizer = records, tokenizer
    self._augment, self._view = config.data.augment, decoding.View.of(config.image)
    self._choose = choice(len(records), config, process, processes)
    self.rows = config.batch_size // processes

  def layout(self) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of each array of a batch."""
    n = self.rows
    return {
      "image": ((n, *self._view.shape), np.uint8),
      "tokens": ((n, self._tokenizer.tokens), np.int32),
      "image_id": ((n,), np.int32),
      "text_id": ((n,), np.int32),
    }

  def fill(self, batch: dict[str, np.ndarray], step: int, rows: slice, run=map) -> int:
    """Writes these rows of batch number `step` -> how many of their images are broken, and grey.

    `run` maps a function over parts of the images, possibly by threads.
    """
    indices, draws = self._choose(step)
    indices, draws = indices[rows], draws[rows]
    images, words, image_ids, text_ids = [], [], [], []
    for record, draw in zip(self._records.read(indices), draws.tolist(), strict=True):
      (image,), (image_id,), captions, ids = examples.parse(record, *_FEATURES)
      images.append(image)
      image_ids.append(image_id)
      words.append(captions[draw % len(captions)].decode("utf-8", "replace"))
      text_ids.append(ids[draw % len(captions)])
    batch["image_id"][rows] = int32(np.array(image_ids, np.int64))
    batch["text_id"][rows] = int32(np.array(text_ids, np.int64))
    batch["tokens"][rows] = self._tokenizer(words)
    boxes = decoding.boxes(images, draws, self._augment, self._view)
    return decoding.decode_all(images, boxes, self._view, batch["image"][rows], run)


_FEATURES = ("image", "image_id", "captions", "text_ids")


def choice(count: int, config, process: int = 0, processes: int = 1):
  """A function: step -> (indices of this process's records, a random int64 for each)."""
  share = (process, config.batch_size // processes)
  return functools.partial(_choose, count, config.seed, config.batch_size, *share)


def _choose(count, seed, batch_size, process, rows, step):
  epoch, batch = divmod(step, count // batch_size)
  begin = batch * batch_size + process * rows
  indices = _order(count, seed, epoch)[begin : begin + rows]
  return indices, _hash(seed, epoch, indices)


@functools.lru_cache(2)
def _order(count, seed, epoch):
  return np.random.default_rng([seed, epoch]).permutation(count)


def int32(ids: np.ndarray) -> np.ndarray:
  """Ids of prepared data are 63-bit hashes: cut to 31 bits, two of them collide once in 2^31."""
  return (ids & (2**31 - 1)).astype(np.int32)


def _hash(seed, epoch, indices):
  """Pseudo-random non-negative int64 of (seed, epoch, index): splitmix64, vectorised."""
  x = np.asarray(indices, np.uint64) + np.uint64((seed * 1_000_003 + epoch) % 2**31 << 32)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
  return (x >> np.uint64(1)).astype(np.int64)
