"""Records on disk → batches on devices: shuffled, sharded, prefetched, started at any step.

An epoch shows every image once, each with one of its captions, in an order that depends on seed
and epoch alone. Batch number n is therefore a function of (seed, n): on any number of devices and
processes, and after a resume, it holds the same pairs and the same crops.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
from collections.abc import Iterator

import jax
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from xe_retrieval.data import columns, datasets, decoding
from xe_retrieval.data.feed import examples, pairs, workers
from xe_retrieval.preparation import cores

choice, int32 = pairs.choice, pairs.int32


class Source:
  """The records of one split, by index; `pairs` is the number of their captions."""

  def __init__(self, name: str, directory: str, split: str):
    builder = datasets.builder(name, directory)
    if split not in builder.info.splits:
      raise ValueError(f"{name} has no split {split!r}; it has {', '.join(builder.info.splits)}")
    self.name, self.split = datasets.title(name, builder), split
    self.features = builder.info.features
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    source = builder.as_data_source(split, deserialize_method=raw)
    self.records = pairs.Records(source.data_source)  # picklable
    self._directory, self._shards = builder.data_path, builder.info.splits[split].filepaths

    manifest = builder.data_path / "manifest.json"
    parts = json.loads(manifest.read_text())["splits"] if manifest.exists() else {}
    self.pairs = parts[split]["pairs"] if split in parts else len(self)

  def __len__(self) -> int:
    return len(self.records)

  def read(self, indices) -> list[bytes]:
    """Serialised records."""
    return self.records.read(indices)

  def column(self, name: str) -> np.ndarray | columns.Strings | columns.Lists:
    """A column of the split, read as needed; strings are bytes."""
    return self._columns[name]

  def captions(self) -> columns.Lists:
    """All captions of every record."""
    captions = self._columns["captions"]
    return columns.Lists(captions.flat.as_text(), captions.starts)

  def fingerprint(self) -> str:
    """A hash of the split's records, independent of where they are stored."""
    return self._columns.about["fingerprint"]

  def image(self, index: int) -> bytes:
    """The encoded image of one record."""
    return _image(self.read([index])[0])

  @functools.cached_property
  def _columns(self):
    """Written by `prepare`; of data sets made otherwise, on first use."""
    names = [name for name in columns.SPEC if name in self.features and name != "image"]
    where = self._directory / "columns" / self.split
    return columns.find_or_make(where, self._shards, names, len(self), self._blocks)

  def _blocks(self):
    for i in range(0, len(self), columns.BLOCK):
      yield self.read(range(i, min(i + columns.BLOCK, len(self))))


def train_batches(
  source: Source, tokenizer, config, start: int = 0, process: int = 0, processes: int = 1
) -> Iterator[dict[str, np.ndarray]]:
  """This process's rows of the global batches `start`, `start` + 1, …, `config.steps` - 1."""
  require_batch(source, config)
  batch = pairs.Pairs(source.records, tokenizer, config, process, processes)
  steps, count = range(start, config.steps), workers.count(config.data.get("workers", 0))

  def compute(step, run):
    out = {name: decoding.aligned(*kind) for name, kind in batch.layout().items()}
    return out, batch.fill(out, step, slice(None), run)

  found = workers.batches(batch, steps, count) if count else _threaded(compute, steps)
  yield from _reported(found, source.name)


def require_batch(source: Source, config) -> None:
  """ValueError if a split has too few images for one batch."""
  if len(source) < config.batch_size:
    raise ValueError(
      f"config.batch_size is {config.batch_size}, but the {source.split} split of {source.name} "
      f"has only {len(source)} images; choose a batch size of at most that"
    )


def image_batches(
  source: Source, view: decoding.View | decoding.Views | int, spans: list[slice]
) -> Iterator[np.ndarray]:
  """The images of each span of records, uint8 [n, *view.shape]."""
  view = decoding.View.of(view)

  def compute(span, run):
    encoded = [_image(record) for record in source.read(range(span.start, span.stop))]
    out = decoding.aligned((len(encoded), *view.shape))
    return out, decoding.decode_all(encoded, decoding.whole(encoded, view), view, out, run)

  yield from _reported(_threaded(compute, spans), source.name)


def spans(count: int, size: int) -> list[slice]:
  """All of `count` records, `size` in each slice; the last is short."""
  return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def _image(record):
  ((image,),) = examples.parse(record, "image")
  return image


def _threaded(compute, items):
  """compute(item, map by a thread per core) of each item, in order, a few ahead.

  Two items at once, so that no core idles at the end of one.
  """
  with contextlib.ExitStack() as stack:
    threads = concurrent.futures.ThreadPoolExecutor
    decoders, readers = threads(cores.available()), threads(2)
    for pool in (decoders, readers):  # shut down in reverse: readers wait for decoders
      stack.callback(pool.shutdown, cancel_futures=True)
    items, coming = iter(items), collections.deque()

    def go_on(count):
      for item in itertools.islice(items, count):
        coming.append(readers.submit(compute, item, decoders.map))

    go_on(4)
    while coming:
      result = coming.popleft().result()
      go_on(1)
      yield result


def _reported(found, name):
  """Batches, of pairs (batch, number of its broken images)."""
  for batch, broken in found:
    if broken:
      logging.error("%s: %d broken images are shown grey", name, broken)
    yield batch


def to_devices(batches: Iterator[dict], sharding, ahead: int = 2) -> Iterator[dict]:
  """Global arrays on the mesh; a thread prefetches `ahead` batches to the devices."""
  put = functools.partial(jax.make_array_from_process_local_data, sharding)

  def fetch():
    batch = next(batches, None)
    return batch and jax.tree.map(put, batch)

  thread = concurrent.futures.ThreadPoolExecutor(1)
  try:
    coming = collections.deque(thread.submit(fetch) for _ in range(ahead + 1))
    while batch := coming.popleft().result():
      coming.append(thread.submit(fetch))
      yield batch
  finally:
    thread.shutdown(cancel_futures=True)
