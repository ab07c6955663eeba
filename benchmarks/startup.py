"""How long a process takes, and how much memory, until it has the first batch of a large data set.

  python -m benchmarks.startup [--records=3300000] [--keep=DIR]

Makes a data set of that many tiny records, with columns as `prepare` writes them, and starts fresh
processes on it: one that trains a vocabulary on all captions and decodes images, and one that reads
cached features of frozen towers. Seconds include importing JAX and TensorFlow (which only process 0
needs, for TensorBoard), and depend on what else the machine does; CPU time of all threads less so.
Memory is the peak of resident pages, those of mapped files among them.
"""

import argparse
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

SHARD = 10_000
WIDTH = 4  # of the cached features
TARGETS = {"seconds": 30, "GiB": 1}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--records", type=int, default=3_300_000)
  parser.add_argument(
    "--keep", default="", help="directory for the data set; reused if it is there"
  )
  parser.add_argument("--start", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.start:
    print(json.dumps(start(args.start, args.keep, args.records)))
    return
  with contextlib.ExitStack() as stack:
    directory = args.keep or stack.enter_context(tempfile.TemporaryDirectory())
    if not (pathlib.Path(directory) / "captions").exists():
      began = time.perf_counter()
      make(pathlib.Path(directory), args.records)
      print(f"made {args.records:,} records in {time.perf_counter() - began:.0f} s", flush=True)
    for kind in ("images", "features"):
      command = [sys.executable, "-m", "benchmarks.startup", f"--start={kind}"]
      command += [f"--keep={directory}", f"--records={args.records}"]
      found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
      cpu, others = sum(found["of"].values()), found["GiB of other processes"]
      print(
        f"first batch of {kind}: {found['seconds']:.1f} s, {cpu:.1f} s of CPU, "
        f"{found['GiB']:.2f} GiB ({others:.2f} in other processes than 0); CPU of {found['of']}",
        flush=True,
      )


def make(directory, count):
  """As `prepare` does it, but for the images: one is the same for all records."""
  from array_record.python import array_record_module

  from xe_retrieval.data import datasets
  from xe_retrieval.preparation import records

  out = io.BytesIO()
  Image.new("RGB", (8, 8), (200, 90, 30)).save(out, "PNG")
  words = [f"{a}{b}" for a in ("be", "da", "li", "mo", "ru") for b in ("ka", "ne", "po", "sti")]
  chosen = np.random.default_rng(0).integers(len(words), size=(count, 9)).tolist()
  work = directory / "work"
  work.mkdir(parents=True)
  shards = {"train": [], "validation": []}
  for split, total in (("train", count), ("validation", SHARD)):
    for first in range(0, total, SHARD):
      path, size = str(work / f"{split}-{first}"), 0
      writer = array_record_module.ArrayRecordWriter(path, records.WRITER)
      rows = range(first, min(first + SHARD, total))
      for i in rows:
        caption = f"{' '.join(words[w] for w in chosen[i])} {i % 50_000}".encode()
        record = records.example(
          image=[out.getvalue()],
          image_id=[records.identity(b"%d" % i)],
          captions=[caption],
          text_ids=[records.identity(caption)],
          file=[b"%09d.jpg" % i],
          caption_ids=[b"%09d.jpg#0" % i],
        )
        writer.write(record)
        size += len(record)
      writer.close()
      shards[split].append((path, len(rows), size))
  datasets.register("captions/large", directory, shards, [], work / "scratch")
  for path in work.iterdir():
    path.is_file() and path.unlink()


def start(kind, directory, count):
  """What training does before its first step -> seconds, CPU time of each part, peak memory."""
  began, of = time.perf_counter(), {"python": round(time.process_time(), 1)}

  def lap(name):
    of[name] = round(time.process_time() - sum(of.values()), 1)

  from configs import cc
  from xe_retrieval.data import mesh
  from xe_retrieval.training import features, loop

  config = cc.get_config()
  config.data.name, config.data.dir, config.data.augment = "captions/large", directory, "none"
  config.text.pretrained = config.image.pretrained = ""
  config.image.size = 32
  lap("imports")
  config, source, _, tokenizer = loop.prepare(config, mesh.make())
  lap("vocabulary")
  source.fingerprint()
  tables = {}
  if kind == "features":
    path = pathlib.Path(directory) / "features.npy"
    if not path.exists():
      np.save(path, np.zeros((count, WIDTH), np.float32))
    table = np.load(path, mmap_mode="r")
    tables = {"text": table, "image": table}
  batch = next(features.batches(source, tokenizer, config, tables))
  lap("batch")
  assert len(source) == count and len(batch["text_id"]) == config.batch_size
  first = {"GiB of other processes": peak()}
  from xe_retrieval.data import cpu_tensorflow  # noqa: F401  process 0 writes TensorBoard's events

  lap("TensorFlow")
  return first | {"seconds": time.perf_counter() - began, "GiB": peak(), "of": of}


def peak():
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.split("VmHWM:")[1].split()[0]) / 2**20


if __name__ == "__main__":
  main()
