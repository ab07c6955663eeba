"""What is there twice: in one split, where it is left out, and in two, where it is reported."""

import os
import pathlib
from typing import NamedTuple

import numpy as np
from array_record.python import array_record_module

from xe_retrieval.data import near_duplicates, records


class Keys(NamedTuple):
  """What tells the n pictures of one split and their p captions apart, over all units."""

  unit: np.ndarray  # int64 [n], which wrote it
  nth: np.ndarray  # int64 [n], of what that unit has read
  row: np.ndarray  # int64 [n], of what that unit has written
  files: list[str]  # [n]
  image_ids: np.ndarray  # int64 [n]
  text_ids: np.ndarray  # int64 [p]
  captions: np.ndarray  # int64 [n], how many it has
  sizes: np.ndarray  # int64 [n], bytes of its record
  fingerprints: np.ndarray  # uint8 [f, 16], of those that were decoded
  fingerprinted: np.ndarray  # int64 [f], which these are


def load(work: pathlib.Path, units: int, split: str) -> Keys:
  """Of everything that the units have written of a split."""
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
  """int64 [r]: the pictures that stand above already, and with all of their captions."""
  record = np.repeat(np.arange(len(keys.image_ids)), keys.captions)  # [p]
  mixed = keys.image_ids[record].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  _, first, same = np.unique(
    mixed ^ keys.text_ids.astype(np.uint64), return_index=True, return_inverse=True
  )
  new = record[first[same]] == record  # [p]: this caption of this picture is not above
  return np.flatnonzero(np.bincount(record[new], minlength=len(keys.image_ids)) == 0)


def between(keys: Keys, train: Keys) -> list[tuple[str, str, int]]:
  """(file, file of train, bits apart): exact copies, and of what was decoded also lookalikes."""
  order = np.argsort(train.image_ids, kind="stable")
  place = np.searchsorted(train.image_ids[order], keys.image_ids)
  at = order[np.minimum(place, len(order) - 1)]
  copies = np.flatnonzero(train.image_ids[at] == keys.image_ids)
  found = {int(i): (int(at[i]), 0) for i in copies}
  for i, j, bits in near_duplicates.find(keys.fingerprints, train.fingerprints):
    found.setdefault(int(keys.fingerprinted[i]), (int(train.fingerprinted[j]), int(bits)))
  return [(keys.files[i], train.files[j], bits) for i, (j, bits) in sorted(found.items())]


def without(path: pathlib.Path, rows: set[int]) -> pathlib.Path:
  """A shard that lacks these rows, made in place of the one that has them."""
  out, unfinished = path.with_suffix(".unique"), path.with_suffix(".tmp")
  if not out.exists():  # made before an interruption
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
