"""Images and captions → shards of serialised tf.train.Examples, without TensorFlow.

A unit of work is one tar shard, or a few thousand images of a table. One process writes it, to one
ArrayRecord file per split; its .json, written last, marks it as done. The files are therefore the
same for any number of processes and after any interruption.
"""

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Iterator

import numpy as np
from array_record.python import array_record_module

from xe_retrieval.preparation import archives, caption_tables, image_files
from xe_retrieval.preparation.caption_tables import Sample
from xe_retrieval.preparation.rejections import Rejected, Rejection

WRITER = "group_size:1,uncompressed"  # random access; JPEGs do not compress further


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of `prepare` that apply to every image."""

  max_side: int | None = 384
  max_pixels: int = 50_000_000
  shares: tuple[tuple[str, float], ...] = (("train", 0.9), ("validation", 0.05), ("test", 0.05))
  strict: bool = False

  def plan(self) -> dict:
    """The options that change what is written."""
    out = dataclasses.asdict(self)
    del out["strict"]
    return out


@dataclasses.dataclass(frozen=True)
class TableUnit:
  folder: archives.Folder | archives.TarFolder
  samples: list[Sample]

  def read(self) -> Iterator[tuple[Sample, bytes | Rejected] | Rejection]:
    for sample in self.samples:
      try:
        yield sample, self.folder.read(sample.file)
      except Rejected as e:
        yield sample, e

  def where(self, nth: int, file: str) -> list[str]:
    """The rows of the table behind sample number `nth`."""
    return [caption.where for caption in self.samples[nth].captions]


@dataclasses.dataclass(frozen=True)
class TarUnit:
  path: str
  split: str | None
  elsewhere: bool = False  # it is read by another machine, see archives.samples

  def read(self) -> Iterator[tuple[Sample, bytes | Rejected] | Rejection]:
    return archives.samples(self.path, self.split, self.elsewhere)

  def where(self, nth: int, file: str) -> list[str]:
    return [f"{os.path.basename(self.path)}:{caption_tables.printable(file)}"]


def write(
  unit: TableUnit | TarUnit, number: int, directory, options: Options, on_image=lambda: None
) -> None:
  """Writes the files of a unit under `directory`, its .json last and atomically.

  `on_image` is called for every image.
  """
  warnings.simplefilter("ignore")  # Pillow's, about files that are rejected anyway
  directory = pathlib.Path(directory)
  writers, contents, rejections = {}, collections.defaultdict(_Contents), []

  def reject(*new):
    rejections.extend(new)
    if options.strict and new:
      raise ValueError(str(new[0]))

  seen = set()
  for nth, item in enumerate(unit.read()):
    on_image()
    if isinstance(item, Rejection):
      reject(item)
      continue
    sample, data = item
    try:
      if isinstance(data, Rejected):
        raise data
      image, fingerprint = image_files.check(data, options.max_side, options.max_pixels)
      image_id = identity(data)
      text_ids = [identity(c.text.casefold().encode()) for c in sample.captions]
      split = sample.split or share(image_id, options.shares)
      pairs = {(split, image_id, t) for t in text_ids}
      if seen >= pairs:  # duplicates in other units are found at the end
        raise Rejected("duplicate", "the same image has the same caption above")
    except Rejected as e:
      reject(*(Rejection(c.where, sample.file, e.reason, e.detail) for c in sample.captions))
      continue
    seen |= pairs
    if split not in writers:
      path = str(directory / shard_name(number, split))
      writers[split] = array_record_module.ArrayRecordWriter(path, WRITER)
    record = example(
      image=[image],
      image_id=[image_id],
      captions=[c.text.encode() for c in sample.captions],
      text_ids=text_ids,
      file=[sample.file.encode()],
      caption_ids=[c.id.encode() for c in sample.captions],
    )
    writers[split].write(record)
    contents[split].add(nth, sample.file, image_id, text_ids, len(record), fingerprint)
  for writer in writers.values():
    writer.close()
  for split, content in contents.items():
    np.savez(directory / keys_name(number, split), **content.keys())
  summary = {"splits": list(contents), "rejections": rejections}
  replace(directory / f"{number:05d}.json", json.dumps(summary))


def shard_name(number: int, split: str) -> str:
  return f"{number:05d}.{split}.array_record"


def keys_name(number: int, split: str) -> str:
  return f"{number:05d}.{split}.npz"


def replace(path: pathlib.Path, text: str) -> None:
  """Writes a file atomically."""
  unfinished = path.with_suffix(".tmp")
  unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
  os.replace(unfinished, path)


def table_lines(rows) -> str:
  """Rows as lines of a TSV file."""
  return "".join("\t".join(" ".join(str(v).split()) for v in row) + "\n" for row in rows)


def identity(data: bytes) -> int:
  """A 63-bit hash of the contents: processes agree on ids without communication."""
  return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "little") >> 1


def share(image_id: int, shares) -> str:
  """The split of an image, by its hash: copies of an image are never in two splits."""
  at = image_id / 2**63
  for split, size in shares:
    at -= size
    if at < 0:
      return split
  return shares[-1][0]


def example(**features: list[bytes] | list[int]) -> bytes:
  """A serialised tf.train.Example. (TensorFlow would cost every process seconds and 0.7 GB.)"""
  entries = []
  for name, values in features.items():
    if isinstance(values[0], bytes):
      feature = _field(1, [part for v in values for part in _field(1, [v])])  # BytesList
    else:
      feature = _field(3, _field(1, [*map(_varint, values)]))  # Int64List, packed
    entries += _field(1, _field(1, [name.encode()]) + _field(2, feature))
  return b"".join(_field(1, entries))


def _field(number, parts):
  """A length-delimited field as a list of parts: the image is copied only once, at the end."""
  return [bytes([number << 3 | 2]) + _varint(sum(map(len, parts))), *parts]


def _varint(value):
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)


class _Contents:
  """What one unit has written to the shard of one split."""

  def __init__(self):
    self.nth, self.files, self.image_ids, self.text_ids = [], [], [], []
    self.captions, self.sizes = [], []
    self.fingerprints, self.fingerprinted = [], []

  def add(self, nth, file, image_id, text_ids, size, fingerprint):
    if fingerprint is not None:
      self.fingerprints.append(fingerprint)
      self.fingerprinted.append(len(self.files))
    self.nth.append(nth)
    self.files.append(file)
    self.image_ids.append(image_id)
    self.text_ids += text_ids
    self.captions.append(len(text_ids))
    self.sizes.append(size)

  def keys(self):
    """The arrays of duplicates.Keys."""
    return {
      "nth": np.array(self.nth, np.int64),
      "files": np.frombuffer("\0".join(self.files).encode(), np.uint8),
      "image_ids": np.array(self.image_ids, np.int64),
      "text_ids": np.array(self.text_ids, np.int64),
      "captions": np.array(self.captions, np.int64),
      "sizes": np.array(self.sizes, np.int64),
      "fingerprints": np.frombuffer(b"".join(self.fingerprints), np.uint8).reshape(-1, 16),
      "fingerprinted": np.array(self.fingerprinted, np.int64),
    }
