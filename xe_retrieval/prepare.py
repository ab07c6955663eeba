"""Prepare: your images and captions → a data set on disk, sharded and checked.

  python -m xe_retrieval.prepare --captions=captions.tsv --images=photos --out=datasets
  python -m xe_retrieval.prepare --webdataset='train=cc/{00000..00331}.tar' --out=datasets
  python -m xe_retrieval.prepare --flickr30k=dataset_flickr30k.json --images=photos --out=datasets
  python -m xe_retrieval.prepare --coco=captions_train2017.json --images=train2017 --out=datasets

Then train with --config.data.name=captions/NAME (or conceptual_captions, or flickr30k) and
--config.data.dir=datasets. After an interruption, the same command resumes. Beside the data,
rejected.tsv lists every row that was left out, with the reason; manifest.json has the counts.

On Apache Beam, with files wherever it finds them (pip install -c constraints.txt -e '.[beam]'):

  python -m xe_retrieval.prepare --webdataset='train=gs://b/{00000..00331}.tar' --out=gs://b/datasets
    --runner=DataflowRunner -- --project=p --region=r --temp_location=gs://b/tmp …

--runner=DirectRunner runs on this machine: -- --direct_num_workers=8
--direct_running_mode=multi_processing. What follows -- are Beam's own options.
"""

import hashlib
import importlib.util
import itertools
import logging
import os
import pathlib
import re
import signal
import sys
import tempfile

from absl import app, flags

from xe_retrieval import config as config_lib
from xe_retrieval.preparation import archives, caption_tables, cores, jobs, records


def prepare(
  job: jobs.Job,
  out: str,
  options: records.Options,
  processes: int = 1,
  progress: bool = False,
  beam_settings=None,
) -> dict:
  """Makes the data set under `out` and returns its manifest.

  `beam_settings`, a preparation.beam.Settings, runs it on Apache Beam instead of in processes.
  """

  def register(*arguments):
    from xe_retrieval.data import datasets  # here: importing TFDS takes a second

    return datasets.register(*arguments)

  if beam_settings is not None:
    from xe_retrieval.preparation import beam

    return beam.run(job, out, options, register, beam_settings, progress)
  return jobs.run(job, out, options, register, processes, progress)


def table(captions: str, images: str, name: str = "") -> jobs.Job:
  """A CSV, TSV or JSONL file and a folder (or tar) of images."""
  name = f"captions/{name or pathlib.Path(captions).stem}"
  grouped = caption_tables.group(caption_tables.rows(captions))
  return _table_job(name, _digest(captions), images, grouped)


def flickr30k(captions: str, images: str, name: str = "") -> jobs.Job:
  """Karpathy's JSON file and a folder (or tar) of images.

  Equal captions of an image are kept: published results use all 5,000 captions of the test split.
  """
  name = f"captions/{name}" if name else "flickr30k"
  grouped = caption_tables.group(caption_tables.karpathy(captions), duplicates=True)
  return _table_job(name, _digest(captions), images, grouped)


def coco(files: list[str], images: str, name: str = "") -> jobs.Job:
  """COCO's files of captions, [split=]captions_….json, and a folder (or tar) of images.

  captions_train2017.json finds its images in the folder itself or in its folder train2017. Equal
  captions of an image are kept, as judgements name them by their ids.
  """
  parts = [caption_tables.split_and_path("coco", text) for text in files]
  rows = itertools.chain(*(caption_tables.coco(path, split) for split, path in parts))
  within = tuple(pathlib.Path(path).stem.removeprefix("captions_") for _, path in parts)
  grouped = caption_tables.group(rows, duplicates=True)
  made_from = {"coco": [_digest(path) | {"split": split} for split, path in parts]}
  return _table_job(f"captions/{name or 'coco'}", made_from, images, grouped, within)


def webdataset(patterns: list[str], name: str = "") -> jobs.Job:
  """Tar shards in the layout of img2dataset; each is a unit of work."""
  shards = [shard for pattern in patterns for shard in archives.shards(pattern)]
  made_from = [[archives.absolute(path), archives.size(path), split] for path, split in shards]
  units = [records.TarUnit(archives.absolute(path), split) for path, split in shards]
  name = f"captions/{name}" if name else "conceptual_captions"
  stamp = archives.stamp_of_shards([path for path, _ in shards])
  return jobs.Job(name, {"webdataset": made_from, "stamp": stamp}, units)


def shares(text: str) -> tuple[tuple[str, float], ...]:
  """train=0.9,test=0.1 -> (("train", 0.9), ("test", 0.1))."""
  found = re.fullmatch(r"[A-Za-z]\w*=[0-9.]+(,[A-Za-z]\w*=[0-9.]+)*", text)
  pairs = [part.split("=") for part in text.split(",")] if found else []
  if abs(sum(float(share) for _, share in pairs) - 1) > 1e-6:
    raise ValueError(f"--shares={text} should be like train=0.9,validation=0.05,test=0.05")
  return tuple((split, float(share)) for split, share in pairs)


def main(argv):
  given = flags.FLAGS
  if len(argv) > 1 and not given.runner:
    hint = "; Beam's options need --runner" if argv[1].startswith("--") else ""
    sys.exit(f"error: unexpected argument {argv[1]!r}{hint}")
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    side = None if given.max_side == "none" else int(given.max_side)
    options = records.Options(side, given.max_pixels, shares(given.shares), given.strict)
    settings = _beam(given, argv[1:]) if given.runner else None
    manifest = prepare(_job(given), given.out, options, given.processes, True, settings)
  except ValueError as e:
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    sys.exit("\nstopped; run the same command to resume")
  except OSError as e:
    sys.exit(f"error: {e}; run the same command to resume")
  except Exception as e:  # filesystems raise what their libraries do: no access, no such bucket
    if not given.runner or given["verbosity"].present:
      raise
    why = " ".join(str(e).split())[:500]
    sys.exit(f"error: {type(e).__name__}: {why}; --verbosity=0 shows where")
  print(_summary(manifest, given.out))


def _beam(given, arguments):
  if not importlib.util.find_spec("apache_beam"):
    raise ValueError("--runner needs a package: pip install -c constraints.txt -e '.[beam]'")
  quiet = not given["verbosity"].present
  if quiet:
    logging.getLogger().setLevel(logging.ERROR)  # its import warns of extras that we do not use
  from xe_retrieval.preparation import beam

  settings = beam.Settings(given.runner, arguments, quiet)
  settings.use()  # wrong ones are said before anything is read
  return settings


def _job(given):
  makers = {"captions": table, "webdataset": webdataset, "flickr30k": flickr30k, "coco": coco}
  sources = [source for source in makers if given[source].value]
  if len(sources) != 1:
    *others, last = (f"--{source}" for source in makers)
    raise ValueError(f"exactly one of {', '.join(others)} and {last} is needed")
  make, value = makers[sources[0]], given[sources[0]].value
  if make is webdataset:
    return webdataset(value, given.name)
  if not given.images:
    raise ValueError(f"--{sources[0]} needs --images, the folder of the images")
  with tempfile.TemporaryDirectory() as directory:
    value = [_fetched(v, directory) for v in value] if make is coco else _fetched(value, directory)
    return make(value, given.images, given.name)


def _fetched(value, directory):
  """A table, [split=]path, that may be remote; a copy of it if so."""
  split, path = re.fullmatch(r"(\w+=(?=\w+://))?(.*)", value, re.DOTALL).groups("")
  if not archives.is_remote(path):
    return value
  from xe_retrieval.preparation.beam import filesystems

  return split + filesystems.fetched(path, directory)


def _digest(captions):
  with open(captions, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"captions": os.path.basename(captions), "sha256": digest}


def _table_job(name, made_from, images, grouped, within=()):
  if not re.fullmatch(r"flickr30k|captions/\w[\w.-]*", name):
    raise ValueError(f"{name}: a name has only letters, digits, _, . and -; choose another --name")
  samples, rejections = grouped
  folder = archives.folder(images, within)
  size = min(max(len(samples) // 64, 256), 4096)  # the same for any --processes
  parts = [samples[start : start + size] for start in range(0, len(samples), size)]
  units = [records.TableUnit(folder.part([s.file for s in part]), part) for part in parts]
  made_from |= {
    "images": archives.absolute(images),
    "stamp": folder.stamp([s.file for s in samples]),
  }
  return jobs.Job(name, made_from, units, rejections)


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
    lines.append("  (JPEGs were not decoded: only exact copies were found)")
  name = manifest["plan"]["name"]
  run = f"--config=configs/own.py:{os.path.join(out, name)} --workdir=runs/{os.path.basename(name)}"
  lines.append(f"train on it: python -m xe_retrieval.main {run}")
  lines.append(f"or by any config, with --config.data.name={name} --config.data.dir={out}")
  return "\n".join(lines)


def _define_flags():
  flags.DEFINE_string("captions", None, "CSV, TSV or JSONL with image, caption[, split, …].")
  flags.DEFINE_string("images", None, "Folder (or uncompressed tar) of the images.")
  flags.DEFINE_multi_string("webdataset", [], "Tar shards, as [split=]name{00000..00331}.tar.")
  flags.DEFINE_string("flickr30k", None, "Karpathy's dataset_flickr30k.json.")
  flags.DEFINE_multi_string(
    "coco", [], "COCO's captions_train2017.json, or [split=]file; may be repeated."
  )
  flags.DEFINE_string("out", "datasets", "Directory of data sets; --config.data.dir of training.")
  flags.DEFINE_string("name", "", "The data set is called captions/NAME.")
  flags.DEFINE_string(
    "max_side",
    "384",
    "Larger images are scaled down to this; none: files are copied, JPEGs without decoding.",
  )
  flags.DEFINE_integer("max_pixels", 50_000_000, "Larger images are left out.", lower_bound=1)
  flags.DEFINE_string(
    "shares", "train=0.9,validation=0.05,test=0.05", "Shares of images, if the data name no splits."
  )
  flags.DEFINE_bool("strict", False, "Stop at the first row that would be left out.")
  flags.DEFINE_integer("processes", cores.available(), "Worker processes.", lower_bound=1)
  flags.DEFINE_enum(
    "runner",
    None,
    ["DirectRunner", "FlinkRunner", "SparkRunner", "DataflowRunner", "PortableRunner"],
    "Prepare on Apache Beam instead of in processes. Beam's own options follow after --.",
  )


_REMOTE = ("", "captions", "images", "webdataset", "flickr30k", "coco", "out")  # "": Beam's own


def _parse_flags(argv):
  """Paths may be remote where Beam opens them."""
  on_beam = any(re.match("--?runner\\b", word) for word in argv)
  return config_lib.parse_flags(argv, _REMOTE if on_beam else ())


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=_parse_flags)
