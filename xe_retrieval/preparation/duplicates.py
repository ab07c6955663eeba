"""Duplicate images: left out within a split, reported between splits."""

import os
import pathlib
from typing import NamedTuple

import numpy as np
from array_record.python import array_record_module

from xe_retrieval.preparation import near_duplicates, records


class Keys(NamedTuple):
  """Ids and positions of the n images of one split and their p captions, over all units."""

  unit: np.ndarray  # int64 [n], which unit wrote the image
  nth: np.ndarray  # int64 [n], position among the samples that the unit read
  row: np.ndarray  # int64 [n], position in the shard that the unit wrote
  files: list[str]  # [n]
  image_ids: np.ndarray  # int64 [n]
  text_ids: np.ndarray  # int64 [p]
  captions: np.ndarray  # int64 [n], number of captions
  sizes: np.ndarray  # int64 [n], bytes of the record
  fingerprints: np.ndarray  # uint8 [f, 16], of images that were decoded
  fingerprinted: np.ndarray  # int64 [f], indices of these images


def load(work: pathlib.Path, units: int, split: str) -> Keys:
  """Concatenates the keys that the units saved for a split."""
  parts, files, before = {name: [] for name in Keys._fields if name != "files"}, [], 0
  for unit in range(units):
    path = work / records.keys_name(unit, split)
    if not path.exists():
      continue
    with np.load(path, allow_pickle=False) as saved:
      count = len(saved["image_ids"])
      new = {name: saved[name] for name in parts if name in saved}
      files += saved["files"].tobytes().decode().split("\0")
    new |= {"unit": np.full(count, unit), "row": np.arange(count)}
    new["fingerprinted"] = new["fingerprinted"] + before
    before += count
    for name, values in new.items():
      parts[name].append(values)
  return Keys(files=files, **{name: np.concatenate(values) for name, values in parts.items()})


def repeated(keys: Keys) -> np.ndarray:
  """int64 [r]: images that occur before, with all of their captions."""
  record = np.repeat(np.arange(len(keys.image_ids)), keys.captions)  # [p]
  mixed = keys.image_ids[record].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  _, first, same = np.unique(
    mixed ^ keys.text_ids.astype(np.uint64), return_index=True, return_inverse=True
  )
  new = record[first[same]] == record  # [p]: first occurrence of this caption with this image
  return np.flatnonzero(np.bincount(record[new], minlength=len(keys.image_ids)) == 0)


def between(keys: Keys, train: Keys) -> list[tuple[str, str, int]]:
  """(file, file of train, bits apart): exact copies, and near duplicates if decoded."""
  order = np.argsort(train.image_ids, kind="stable")
  place = np.searchsorted(train.image_ids[order], keys.image_ids)
  at = order[np.minimum(place, len(order) - 1)]
  copies = np.flatnonzero(train.image_ids[at] == keys.image_ids)
  found = {int(i): (int(at[i]), 0) for i in copies}
  for i, j, bits in near_duplicates.find(keys.fingerprints, train.fingerprints):
    found.setdefault(int(keys.fingerprinted[i]), (int(train.fingerprinted[j]), int(bits)))
  return [(keys.files[i], train.files[j], bits) for i, (j, bits) in sorted(found.items())]


def without(path: pathlib.Path, rows: set[int]) -> pathlib.Path:
  """Replaces a shard by one without these rows; returns its path."""
  out, unfinished = path.with_suffix(".unique"), path.with_suffix(".tmp")
  if not out.exists():  # else written before an interruption
    reader = array_record_module.ArrayRecordReader(str(path))
    writer = array_record_module.ArrayRecordWriter(str(unfinished), records.WRITER)
    for row in range(reader.num_records()):
      record = reader.read()
      if row not in rows:
        writer.write(record)
    writer.close()
    reader.close()
    os.replace(unfinished, out)
    path.unlink()
  return out
