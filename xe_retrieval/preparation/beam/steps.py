"""What Beam's workers do: write units, compare their keys, finish each unit.

Workers share only the directory of unfinished work. Every file appears in it whole, with the same
bytes whoever writes it: a bundle may be repeated, or run twice at a time.
"""

import collections
import contextlib
import io
import json
import os
import pathlib
import socket
import tempfile

import apache_beam as beam
import numpy as np
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from xe_retrieval.preparation import archives, caption_tables, duplicates, near_duplicates, records
from xe_retrieval.preparation.beam import filesystems
from xe_retrieval.preparation.rejections import Rejection

ERROR = "error.txt"  # why the pipeline stopped, in one sentence
_FOLDERS = {
  "folder": archives.Folder,
  "tar": archives.TarFolder,
  "remote folder": filesystems.Folder,
}


def pack(unit: records.TableUnit | records.TarUnit) -> str:
  """A unit as JSON: the samples of a large table would not fit in a pipeline's description."""
  if isinstance(unit, records.TarUnit):
    return json.dumps({"path": unit.path, "split": unit.split})
  kind = next(kind for kind, known in _FOLDERS.items() if type(unit.folder) is known)
  return json.dumps({"kind": kind, "folder": vars(unit.folder), "samples": unit.samples})


def unpack(text: str) -> records.TableUnit | records.TarUnit:
  packed = json.loads(text)
  if "kind" not in packed:
    return records.TarUnit(**packed, elsewhere=True)
  folder = object.__new__(_FOLDERS[packed["kind"]])
  folder.__dict__ = packed["folder"]
  samples = [
    caption_tables.Sample(file, split, [caption_tables.Caption(*c) for c in captions])
    for file, split, captions in packed["samples"]
  ]
  return records.TableUnit(folder, samples)


class _Step(beam.DoFn):
  """A step that knows the directory, and leaves there why it failed."""

  def __init__(self, work: filesystems.Path, options: records.Options, buckets: int, arguments):
    self.work, self.options, self.buckets, self.arguments = work, options, buckets, arguments

  def setup(self):  # not every runner gives its workers the options
    FileSystems.set_options(PipelineOptions(self.arguments))

  @contextlib.contextmanager
  def told(self, number):
    try:
      yield
    except Exception as e:
      sentence = " ".join(str(e).split())
      if not isinstance(e, ValueError):
        sentence = f"part {number}: {type(e).__name__}: {sentence}; run the same command to resume"
      with contextlib.suppress(Exception):  # the first reason counts
        (self.work / ERROR).write_text(sentence)
      raise

  def unit(self, number):
    return unpack((self.work / f"units/{number:05d}.json").read_text())

  def summary(self, number):
    return json.loads((self.work / f"{number:05d}.json").read_text())

  def keys(self, number, split) -> duplicates.Keys:
    name = records.keys_name(number, split)
    return duplicates.read(io.BytesIO((self.work / name).read_bytes()), number)

  def scratch(self):
    """A temporary directory from which files can be moved to their place."""
    local = None if archives.is_remote(self.work) else str(self.work)
    return tempfile.TemporaryDirectory(dir=local)


class Write(_Step):
  """number -> number, of a unit that is written."""

  def process(self, number):
    with self.told(number):
      done = f"{number:05d}.json"
      if not (self.work / done).exists():
        with self.scratch() as directory:
          unit = self.unit(number)
          _check_input(unit)
          records.write(unit, number, directory, self.options)
          for name in sorted(os.listdir(directory), key=done.__eq__):  # it marks the others as done
            (self.work / name).adopt(os.path.join(directory, name))
    yield number


def _check_input(unit):
  """ValueError if this worker does not see what it is to read: its images are not missing."""
  folder = getattr(unit, "folder", unit)
  try:
    if isinstance(folder, archives.Folder):
      with os.scandir(folder.root) as files:
        if next(files, None) is None:  # a mount point without its disk
          raise OSError(f"{folder.root} is empty")
    elif not isinstance(folder, filesystems.Folder):
      filesystems.opened(folder.path).close()
  except OSError as e:
    path = folder.root if isinstance(folder, archives.Folder) else folder.path
    raise ValueError(
      f"{path} cannot be read on {socket.gethostname()}: every worker has to see it; "
      "run the same command to resume"
    ) from e


class Keys(_Step):
  """number -> (bucket, Keys): images of a unit by their ids; equal images meet in a bucket.

  Beside these: `train` (number, Keys) and `held_out` (split, number, Keys) with fingerprints.
  """

  def process(self, number):
    with self.told(number):
      for split in self.summary(number)["splits"]:
        keys = self.keys(number, split)
        buckets = keys.image_ids % self.buckets
        for bucket in np.unique(buckets):
          images = np.flatnonzero(buckets == bucket)
          yield int(bucket), (number, split, duplicates.some(keys, images))
        keys = duplicates.only_fingerprints(keys)
        if split == "train":
          yield beam.pvalue.TaggedOutput("train", (number, keys))
        else:
          keys = keys._replace(files=[""] * len(keys.files))
          yield beam.pvalue.TaggedOutput("held_out", (split, number, keys))


class Compare(_Step):
  """(bucket, Keys of all units) -> (number, fact): images that are repeated, or copies of train."""

  def process(self, element):
    bucket, parts = element
    with self.told(bucket):
      splits = collections.defaultdict(list)
      for _, split, keys in sorted(parts, key=lambda part: part[0]):
        splits[split].append(keys)
      splits = {split: duplicates.concatenate(parts) for split, parts in splits.items()}
      for split, keys in splits.items():
        for i in duplicates.repeated(keys):
          yield int(keys.unit[i]), ("repeated", split, int(keys.row[i]))
        if split != "train" and (train := splits.get("train")):
          for i, j in duplicates.copies(keys, train):
            yield int(keys.unit[i]), ("copy", split, int(keys.row[i]), 0, train.files[j])


class Near(_Step):
  """(number, Keys of train) -> ((number, split, row), nearest image of train in this unit)."""

  def process(self, element, held_out):
    number, train = element
    with self.told(number):
      splits = collections.defaultdict(list)
      for split, _, keys in sorted(held_out, key=lambda part: part[:2]):
        splits[split].append(keys)
      for split, parts in splits.items():
        keys = duplicates.concatenate(parts)
        for i, j, bits in near_duplicates.find(keys.fingerprints, train.fingerprints):
          image, nearest = keys.fingerprinted[i], train.fingerprinted[j]
          at = int(keys.unit[image]), split, int(keys.row[image])
          yield at, (int(bits), number, int(nearest), train.files[nearest])


def near_fact(found):
  """The nearest of all units -> (number, fact)."""
  (number, split, row), (bits, _, _, file) = found
  return number, ("near", split, row, bits, file)


class Finish(_Step):
  """(number, facts) -> what the unit adds to the manifest; writes its lines of the tables."""

  def process(self, element):
    number, facts = element
    with self.told(number):
      summary = self.summary(number)
      rejections = [Rejection(*r) for r in summary["rejections"]]
      self._lines(f"{number:05d}.rejected.tsv", rejections)
      reasons = collections.Counter(r.reason for r in rejections)
      first = {"rejected": str(rejections[0])} if rejections else {}
      splits, facts = {}, list(facts)
      for split in summary["splits"]:
        own = [fact for fact in facts if fact[1] == split]
        splits[split], twice = self._split(number, split, own)
        reasons.update(r.reason for r in twice)
        if twice:
          first[split] = str(twice[0])
      yield {"unit": number, "splits": splits, "rejected": reasons, "first": first}

  def _split(self, number, split, facts):
    keys = self.keys(number, split)
    repeated = np.array(sorted(row for kind, _, row, *_ in facts if kind == "repeated"), np.int64)
    twice = []
    if len(repeated):
      unit = self.unit(number)
      twice = [r for i in repeated for r in duplicates.rejections(unit, keys, i)]
    self._lines(f"{number:05d}.{split}.repeated.tsv", twice)
    near = {row: pair for kind, _, row, *pair in facts if kind == "near"}
    near |= {row: pair for kind, _, row, *pair in facts if kind == "copy"}
    pairs = [(split, keys.files[row], file, bits) for row, (bits, file) in sorted(near.items())]
    self._lines(f"{number:05d}.{split}.near.tsv", pairs)
    kept = len(keys.files) - len(repeated)
    name = records.shard_name(number, split)
    total = duplicates.total(keys, repeated)
    if kept and len(repeated):
      name = self._without(name, repeated)
    return {**total, "near": len(pairs), "shard": name if kept else None}, twice

  def _without(self, name, repeated):
    with self.scratch() as directory:
      shard = pathlib.Path(directory) / name
      with filesystems.opened(str(self.work / name)) as source, shard.open("wb") as file:
        while block := source.read(1 << 20):
          file.write(block)
      unique = duplicates.without(shard, set(repeated.tolist()))
      (self.work / unique.name).adopt(unique)
    return unique.name

  def _lines(self, name, rows):
    if rows:
      (self.work / name).write_text(records.table_lines(rows))
