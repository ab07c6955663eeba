"""Prepare: your images and captions → a data set on disk, sharded and checked.

  python -m xe_retrieval.prepare --captions=captions.tsv --images=photos --out=datasets
  python -m xe_retrieval.prepare --webdataset='train=cc/{00000..00331}.tar' --out=datasets
  python -m xe_retrieval.prepare --flickr30k=dataset_flickr30k.json --images=photos --out=datasets

Then train with --config.data.name=captions/NAME (or conceptual_captions, or flickr30k) and
--config.data.dir=datasets. Interrupted, the same command goes on where it was. What was not kept,
and why, is in manifest.json and rejected.tsv beside the data.
"""

import hashlib
import os
import pathlib
import re
import signal
import sys

from absl import app, flags

from xe_retrieval import command_line
from xe_retrieval.data import archives, preparation, records, tables


def table(captions: str, images: str, name: str = "") -> preparation.Job:
  """A CSV, TSV or JSONL file and a folder (or tar) of pictures."""
  name = f"captions/{name or pathlib.Path(captions).stem}"
  return _pictures(name, captions, images, *tables.group(tables.rows(captions)))


def flickr30k(captions: str, images: str, name: str = "") -> preparation.Job:
  """Karpathy's JSON file and a folder (or tar) of pictures.

  Equal captions of a picture are kept: its test split of 5,000 captions is what others measure on.
  """
  name = f"captions/{name}" if name else "flickr30k"
  samples, rejections = tables.group(tables.karpathy(captions), duplicates=True)
  return _pictures(name, captions, images, samples, rejections)


def webdataset(patterns: list[str], name: str = "") -> preparation.Job:
  """Tar shards as img2dataset writes them; each is a unit of work."""
  shards = [shard for pattern in patterns for shard in archives.shards(pattern)]
  made_from = [[os.path.abspath(path), os.path.getsize(path), split] for path, split in shards]
  units = [records.TarUnit(path, split) for path, split in shards]
  name = f"captions/{name}" if name else "conceptual_captions"
  return preparation.Job(name, {"webdataset": made_from}, units)


def shares(text: str) -> tuple[tuple[str, float], ...]:
  """train=0.9,test=0.1 -> (("train", 0.9), ("test", 0.1))."""
  found = re.fullmatch(r"[A-Za-z]\w*=[0-9.]+(,[A-Za-z]\w*=[0-9.]+)*", text)
  pairs = [part.split("=") for part in text.split(",")] if found else []
  if abs(sum(float(share) for _, share in pairs) - 1) > 1e-6:
    raise ValueError(f"--shares={text} should be like train=0.9,validation=0.05,test=0.05")
  return tuple((split, float(share)) for split, share in pairs)


def main(argv):
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}")
  command_line.quieten()
  given = flags.FLAGS
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    side = None if given.max_side == "none" else int(given.max_side)
    options = records.Options(side, given.max_pixels, shares(given.shares), given.strict)
    manifest = preparation.run(_job(given), given.out, options, given.processes, progress=True)
  except ValueError as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    sys.exit("\nstopped; the same command goes on from there")
  print(_summary(manifest, given.out))


def _job(given):
  sources = [s for s in ("captions", "webdataset", "flickr30k") if given[s].value]
  if len(sources) != 1:
    raise ValueError("prepare what? One of --captions, --webdataset and --flickr30k is needed")
  if sources == ["webdataset"]:
    return webdataset(given.webdataset, given.name)
  if not given.images:
    raise ValueError(f"--{sources[0]} needs --images, the folder of the pictures")
  make = {"captions": table, "flickr30k": flickr30k}[sources[0]]
  return make(given[sources[0]].value, given.images, given.name)


def _pictures(name, captions, images, samples, rejections):
  if not re.fullmatch(r"flickr30k|captions/\w[\w.-]*", name):
    raise ValueError(f"{name}: a name should be of letters, digits, _ and -; choose a --name")
  folder = archives.folder(images)
  size = min(max(len(samples) // 64, 256), 4096)  # not by processes: the shards are always the same
  parts = [samples[start : start + size] for start in range(0, len(samples), size)]
  units = [records.TableUnit(folder.part([s.file for s in part]), part) for part in parts]
  with open(captions, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  made_from = {"captions": os.path.basename(captions), "sha256": digest}
  return preparation.Job(name, made_from | {"images": os.path.abspath(images)}, units, rejections)


def _summary(manifest, out):
  lines = [f"{manifest['plan']['name']}: {manifest['kept']:,} pairs under {out}"]
  for split, part in manifest["splits"].items():
    lines.append(f"  {split}: {part['images']:,} images, {part['pairs']:,} captions")
  for reason, count in manifest["rejected"].items():
    lines.append(f"  left out, {reason}: {count:,}")
  for split, count in manifest["near duplicates of train"].items():
    if count:
      lines.append(f"  {count:,} images of {split} look like images of train (near_duplicates.tsv)")
  if manifest["near duplicates of train"] and manifest["plan"]["max_side"] is None:
    lines.append("  (undecoded JPEGs were compared by their bytes: only exact copies are known)")
  lines.append(f"train on it with --config.data.name={manifest['plan']['name']}")
  return "\n".join(lines) + f" --config.data.dir={out}"


def _define_flags():
  flags.DEFINE_string("captions", None, "CSV, TSV or JSONL with image, caption[, split, …].")
  flags.DEFINE_string("images", None, "Folder (or uncompressed tar) of the pictures.")
  flags.DEFINE_multi_string(
    "webdataset", [], "Tar shards: name{00000..00331}.tar; 'split=' before it names their split."
  )
  flags.DEFINE_string("flickr30k", None, "Karpathy's dataset_flickr30k.json.")
  flags.DEFINE_string("out", "datasets", "Where data sets lie; --config.data.dir of the training.")
  flags.DEFINE_string("name", "", "The data set is called captions/NAME.")
  flags.DEFINE_string(
    "max_side",
    "384",
    "Larger pictures are made this large; none: files are copied, JPEGs without decoding them.",
  )
  flags.DEFINE_integer("max_pixels", 50_000_000, "Larger pictures are left out.", lower_bound=1)
  flags.DEFINE_string(
    "shares", "train=0.9,validation=0.05,test=0.05", "Splits by image, if the data name none."
  )
  flags.DEFINE_bool("strict", False, "Stop at the first row that would be left out.")
  flags.DEFINE_integer("processes", os.cpu_count(), "How many at once.", lower_bound=1)


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=command_line.parse)
