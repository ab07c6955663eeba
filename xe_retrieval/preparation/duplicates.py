"""Duplicate images: left out within a split, reported between splits."""

import os
import pathlib
from typing import NamedTuple

import numpy as np
from array_record.python import array_record_module

from xe_retrieval.preparation import near_duplicates, records
from xe_retrieval.preparation.rejections import Rejection


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
  paths = [(unit, work / records.keys_name(unit, split)) for unit in range(units)]
  return concatenate([read(path, unit) for unit, path in paths if path.exists()])


def read(file, unit: int) -> Keys:
  """The keys that one unit saved for one split; `file` is a path or an open file."""
  with np.load(file, allow_pickle=False) as saved:
    arrays = {name: saved[name] for name in saved.files if name != "files"}
    files = saved["files"].tobytes().decode().split("\0")
  return Keys(unit=np.full(len(files), unit), row=np.arange(len(files)), files=files, **arrays)


def concatenate(parts: list[Keys]) -> Keys:
  before = np.cumsum([0, *(len(part.files) for part in parts)])
  arrays = {
    name: np.concatenate([getattr(part, name) for part in parts])
    for name in Keys._fields
    if name not in ("files", "fingerprinted")
  }
  marked = [part.fingerprinted + start for part, start in zip(parts, before, strict=False)]
  files = [file for part in parts for file in part.files]
  return Keys(files=files, fingerprinted=np.concatenate(marked), **arrays)


def some(keys: Keys, chosen: np.ndarray) -> Keys:
  """Only the images of these indices, in order, and none of the fingerprints."""
  captions = np.zeros(len(keys.files), bool)
  captions[chosen] = True
  one_each = ("unit", "nth", "row", "image_ids", "captions", "sizes")
  return keys._replace(
    files=[keys.files[i] for i in chosen],
    text_ids=keys.text_ids[np.repeat(captions, keys.captions)],
    fingerprints=keys.fingerprints[:0],
    fingerprinted=keys.fingerprinted[:0],
    **{name: getattr(keys, name)[chosen] for name in one_each},
  )


def only_fingerprints(keys: Keys) -> Keys:
  """Without the fields that finding near duplicates does not need."""
  unneeded = ("nth", "image_ids", "text_ids", "captions", "sizes")
  return keys._replace(**{name: getattr(keys, name)[:0] for name in unneeded})


def repeated(keys: Keys) -> np.ndarray:
  """int64 [r]: images that occur before, with all of their captions."""
  record = np.repeat(np.arange(len(keys.image_ids)), keys.captions)  # [p]
  mixed = keys.image_ids[record].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  _, first, same = np.unique(
    mixed ^ keys.text_ids.astype(np.uint64), return_index=True, return_inverse=True
  )
  new = record[first[same]] == record  # [p]: first occurrence of this caption with this image
  return np.flatnonzero(np.bincount(record[new], minlength=len(keys.image_ids)) == 0)


def rejections(unit, keys: Keys, i: int) -> list[Rejection]:
  """Rejections of image i, which an earlier unit than its own has with the same captions."""
  file, detail = keys.files[i], "the same image has the same caption in another part"
  return [Rejection(where, file, "duplicate", detail) for where in unit.where(keys.nth[i], file)]


def total(keys: Keys, repeated: np.ndarray) -> dict:
  """Numbers of images, pairs and bytes without the repeated images."""
  return {
    "images": len(keys.captions) - len(repeated),
    "pairs": int(keys.captions.sum() - keys.captions[repeated].sum()),
    "bytes": int(keys.sizes.sum() - keys.sizes[repeated].sum()),
  }


def between(keys: Keys, train: Keys) -> list[tuple[str, str, int]]:
  """(file, file of train, bits apart): exact copies, and near duplicates if decoded."""
  found = {i: (j, 0) for i, j in copies(keys, train)}
  for i, j, bits in near_duplicates.find(keys.fingerprints, train.fingerprints):
    found.setdefault(int(keys.fingerprinted[i]), (int(train.fingerprinted[j]), int(bits)))
  return [(keys.files[i], train.files[j], bits) for i, (j, bits) in sorted(found.items())]


def copies(keys: Keys, train: Keys) -> list[tuple[int, int]]:
  """(image, the first image of train with the same bytes)."""
  order = np.argsort(train.image_ids, kind="stable")
  place = np.searchsorted(train.image_ids[order], keys.image_ids)
  at = order[np.minimum(place, len(order) - 1)]
  return [(int(i), int(at[i])) for i in np.flatnonzero(train.image_ids[at] == keys.image_ids)]


def without(path: pathlib.Path, rows: set[int]) -> pathlib.Path:
  """Writes a shard without these rows beside it; returns its path."""
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
  return out
