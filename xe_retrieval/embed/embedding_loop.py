"""Pictures of a source through the image tower: read and decoded by threads, batch by batch."""

import collections
import concurrent.futures
import errno
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from xe_retrieval import model as models
from xe_retrieval.data import decoding
from xe_retrieval.data.image_folder import Entry
from xe_retrieval.preparation import cores, image_files

PAUSES = (0.5, 2.0)  # seconds before a picture that a disk does not give is read again
_NEAR = 8  # other pictures by which a bad sector is told from a disk that is gone


class Batch(NamedTuple):
  entries: list[Entry]  # [n], in the order in which they were given
  vectors: np.ndarray  # float32 [n, width], of Scoring.image
  failed: list[tuple[Entry, str]]  # what is no picture, and why


def embed(model, source, entries: Iterable[Entry]) -> Iterator[Batch]:
  """Yields all entries, each once; reads them two batches ahead and no further. OSError if a
  picture cannot be read now, but perhaps later: unless it is one of a disk that gives others.

  While a batch is with the caller, the next one is being computed and the one after it decoded.
  All batches but the last one are full.
  """
  failed, sent = [], collections.deque()  # entries of each batch that the tower has
  with concurrent.futures.ThreadPoolExecutor(cores.available()) as pool:
    try:
      batches = _batches(_decoded(pool, model, source, entries), sent, failed)
      first = next(batches, None)
      if first is not None:
        # A handful of pictures need not be padded to a whole batch.
        size = min(models.BATCH, 1 << (len(first) - 1).bit_length())
        for vectors in model.stream_squares(itertools.chain([first], batches), size):
          yield Batch(sent.popleft(), model.scoring.image(vectors), _taken(failed))
      if failed:
        yield Batch([], np.zeros((0, model.scoring.width), np.float32), _taken(failed))
    finally:
      pool.shutdown(cancel_futures=True)


def check_there(source) -> None:
  """ValueError if the pictures are gone: an unmounted disk leaves an empty folder."""
  source.check()
  if next(iter(source.entries()), None) is None:
    raise ValueError(f"{source.key} holds no pictures: is its disk mounted?")


def chunks(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
  """Joins batches until they hold at least `size` entries, failed ones among them."""
  parts = []
  for batch in batches:
    parts.append(batch)
    if sum(len(part.entries) + len(part.failed) for part in parts) >= size:
      yield _joined(parts)
      parts = []
  if parts:
    yield _joined(parts)


def _joined(parts):
  entries, vectors, failed = zip(*parts, strict=True)
  return Batch(sum(entries, []), np.concatenate(vectors), sum(failed, []))


def _decoded(pool, model, source, entries):
  """Yields (entry, square or why there is none) in order."""
  view, entries = decoding.View.of(model.config.image), iter(entries)
  readable = []  # names of the last pictures that could be read

  def read(entry, pauses=PAUSES):
    try:
      data = source.read(entry.name)
    except OSError as e:
      if e.errno == errno.EIO and pauses:
        time.sleep(pauses[0])
        return read(entry, pauses[1:])
      if image_files.is_passing(e) and not (e.errno == errno.EIO and near(entry)):
        raise OSError(e.errno, os.strerror(e.errno), source.full_name(entry.name)) from e
      return reason(e)
    except ValueError as e:
      return reason(e)
    readable[:] = [*readable[1 - _NEAR :], entry.name]
    try:
      return decoding.square(data, view=view)
    except ValueError as e:
      return reason(e)

  def near(entry):
    """Whether the disk still gives other pictures: then this one lies on a bad sector."""
    first = (e.name for e in source.entries() if e.name != entry.name)
    return source.answers(itertools.chain(readable[:], itertools.islice(first, _NEAR)))

  ahead = collections.deque()
  while True:
    for entry in itertools.islice(entries, 2 * models.BATCH - len(ahead)):
      ahead.append((entry, pool.submit(read, entry)))
    if not ahead:
      return
    entry, future = ahead.popleft()
    yield entry, future.result()


def _batches(decoded, sent, failed):
  """Yields uint8 [≤ BATCH, *view.shape]; appends their entries to `sent`, others to `failed`."""
  good, squares = [], []
  for entry, square in decoded:
    if isinstance(square, str):
      failed.append((entry, square))
      continue
    good.append(entry)
    squares.append(square)
    if len(good) == models.BATCH:
      sent.append(good)
      yield np.stack(squares)
      good, squares = [], []
  if good:
    sent.append(good)
    yield np.stack(squares)


def _taken(items):
  taken = items[:]
  items.clear()
  return taken


def reason(error: Exception) -> str:
  """Strips the location prefix from an error message, so that it fits one line of a list."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror  # the name is listed beside it
  text = re.sub(r" <_io.BytesIO object at \w+>", "", str(error))  # Pillow's name of bytes
  return text.removeprefix("images[0] is ").replace("\t", " ").replace("\n", " ")
