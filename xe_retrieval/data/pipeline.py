"""Records on disk → batches on devices: shuffled, sharded, prefetched, started at any step.

An epoch shows every image once, each with one of its captions, in an order that depends on seed
and epoch alone. Batch number n is therefore a function of (seed, n): on any number of devices and
processes, and after a resume, it holds the same pairs and the same crops.
"""

import collections
import concurrent.futures
import functools
import json
from collections.abc import Iterator

import jax
import numpy as np
from absl import logging

from xe_retrieval.data import columns, datasets, decoding
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.preparation import cores

import tensorflow_datasets as tfds  # isort: skip


class Source:
  """The records of one split, by index; `pairs` is the number of their captions."""

  def __init__(self, name: str, directory: str, split: str):
    builder = datasets.builder(name, directory)
    if split not in builder.info.splits:
      raise ValueError(f"{name} has no split {split!r}; it has {', '.join(builder.info.splits)}")
    self.name, self.split = datasets.title(name, builder), split
    self.features = builder.info.features
    self._records = builder.as_data_source(
      split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
    )
    self._directory, self._shards = builder.data_path, builder.info.splits[split].filepaths

    manifest = builder.data_path / "manifest.json"
    parts = json.loads(manifest.read_text())["splits"] if manifest.exists() else {}
    self.pairs = parts[split]["pairs"] if split in parts else len(self)

  def __len__(self) -> int:
    return len(self._records)

  def read(self, indices) -> list[bytes]:
    """Serialised records."""
    return self._records.__getitems__([int(i) for i in indices])

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
    return tf.io.parse_example(self.read([index]), _spec("image"))["image"].numpy()[0]

  @functools.cached_property
  def _columns(self):
    """Written by `prepare`; of data sets made otherwise, on first use."""
    names = [name for name in columns.SPEC if name in self.features and name != "image"]
    where = self._directory / "columns" / self.split
    return columns.find_or_make(where, self._shards, names, len(self), self._blocks)

  def _blocks(self):
    for i in range(0, len(self), columns.BLOCK):
      yield self.read(range(i, min(i + columns.BLOCK, len(self))))


def _spec(*names):
  return {name: columns.SPEC[name] for name in names}


def train_batches(
  source: Source, tokenizer, config, start: int = 0, process: int = 0, processes: int = 1
) -> Iterator[dict[str, np.ndarray]]:
  """This process's rows of the global batches `start`, `start` + 1, …, `config.steps` - 1."""
  if len(source) < config.batch_size:
    raise ValueError(
      f"config.batch_size is {config.batch_size}, but the {source.split} split of {source.name} "
      f"has only {len(source)} images; choose a batch size of at most that"
    )
  rows = config.batch_size // processes
  choose = choice(len(source), config, process, processes)
  view = decoding.View.of(config.image)

  def read(step):
    indices, draws = choose(int(step))
    return np.array(source.read(indices), object), draws

  def pairs(step):
    records, draws = tf.numpy_function(read, [step], (tf.string, tf.int64), stateful=False)
    records.set_shape([rows])
    draws.set_shape([rows])
    record = tf.io.parse_example(records, _spec(*_PAIR))
    chosen = draws % tf.cast(record["captions"].row_lengths(), tf.int64)
    box = _boxes(record["image"], draws, config.data.augment, view)
    words = tf.gather(record["captions"], chosen, batch_dims=1)
    tokens = tf.numpy_function(tokenised, [words], tf.int32, stateful=False)
    batch = {
      "image": record["image"],
      "box": box,
      "image_id": _int32(record["image_id"]),
      "text_id": _int32(tf.gather(record["text_ids"], chosen, batch_dims=1)),
      "tokens": tf.ensure_shape(tokens, [None, tokenizer.tokens]),
    }
    return {name: tf.ensure_shape(value, [rows, *value.shape[1:]]) for name, value in batch.items()}

  def tokenised(captions):
    return tokenizer([c.decode("utf-8", "replace") for c in captions])

  data = tf.data.Dataset.range(start, config.steps).map(pairs).prefetch(1)
  yield from _decoded(data, view, rows, source.name).prefetch(2).as_numpy_iterator()


def choice(count: int, config, process: int = 0, processes: int = 1):
  """A function: step -> (indices of this process's records, a random int64 for each)."""
  rows, per_epoch = config.batch_size // processes, count // config.batch_size

  @functools.lru_cache(2)
  def order(epoch):
    return np.random.default_rng([config.seed, epoch]).permutation(count)

  def choose(step):
    epoch, batch = divmod(step, per_epoch)
    begin = batch * config.batch_size + process * rows
    indices = order(epoch)[begin : begin + rows]
    return indices, _hash(config.seed, epoch, indices)

  return choose


_PAIR = ("image", "image_id", "captions", "text_ids")


def image_batches(
  source: Source, view: decoding.View | int, spans: list[slice]
) -> Iterator[np.ndarray]:
  """The images of each span of records, uint8 [n, size, size, 3]."""
  if not spans:
    return
  view = decoding.View.of(view)

  def read(start, stop):
    return np.array(source.read(range(start, stop)), object)

  def images(span):
    records = tf.numpy_function(read, [span[0], span[1]], tf.string, stateful=False)
    records.set_shape([None])
    encoded = tf.io.parse_example(records, _spec("image"))["image"]
    return {"image": encoded, "box": _boxes(encoded, tf.zeros([0], tf.int64), "none", view)}

  data = tf.data.Dataset.from_tensor_slices([(s.start, s.stop) for s in spans])
  data = data.map(images).prefetch(1)
  data = _decoded(data, view, None, source.name).prefetch(2)
  for batch in data.as_numpy_iterator():
    yield batch["image"]


def spans(count: int, size: int) -> list[slice]:
  """All of `count` records, `size` in each slice; the last is short."""
  return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def _boxes(encoded, draws, augment, view):
  """Where to crop each image of a batch; string [n], int64 [n] -> int32 [n, 4]."""

  def boxes(encoded, draws):
    if augment == "random_resized_crop":
      return decoding.random_crops(encoded, draws)
    return decoding.whole(encoded, view)

  box = tf.numpy_function(boxes, [encoded, draws], tf.int32, stateful=False)
  return tf.ensure_shape(box, [None, 4])


def _decoded(data, view, rows, name):
  """Batches of `rows` encoded images (None: any number) -> decoded, on all cores, in order."""
  pool = concurrent.futures.ThreadPoolExecutor(cores.available())

  def decode(encoded, boxes):
    out, broken = decoding.decode_all(encoded, boxes, view, pool)
    if broken:
      logging.error("%s: %d broken images are shown grey", name, broken)
    return out

  def images(batch):
    encoded, boxes = batch.pop("image"), batch.pop("box")
    decoded = tf.numpy_function(decode, [encoded, boxes], tf.uint8, stateful=False)
    return {**batch, "image": tf.ensure_shape(decoded, (rows, view.size, view.size, 3))}

  # Two batches in parallel, so that no thread idles at the end of one. With nothing left to tune,
  # autotuning is off: closing an iterator would wait until its thread wakes up.
  options = tf.data.Options()
  options.autotune.enabled = False
  return data.map(images, 2, deterministic=True).with_options(options)


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


def int32(ids: np.ndarray) -> np.ndarray:
  """Ids of prepared data are 63-bit hashes: cut to 31 bits, two of them collide once in 2^31."""
  return (ids & (2**31 - 1)).astype(np.int32)


def _int32(ids):
  """The same as TensorFlow operations."""
  return tf.cast(tf.bitwise.bitwise_and(ids, 2**31 - 1), tf.int32)


def _hash(seed, epoch, indices):
  """Pseudo-random non-negative int64 of (seed, epoch, index): splitmix64, vectorised."""
  x = np.asarray(indices, np.uint64) + np.uint64((seed * 1_000_003 + epoch) % 2**31 << 32)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
  return (x >> np.uint64(1)).astype(np.int64)
