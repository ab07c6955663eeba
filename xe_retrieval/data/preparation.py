"""Units of work → a finished TFDS data set: in parallel, resumable, and all at once at the end."""

import collections
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from xe_retrieval.data import near_duplicates, records
from xe_retrieval.data.rejected import REASONS, Rejection


class Job(NamedTuple):
  """What is to be made of what."""

  name: str  # captions/<name>, conceptual_captions or flickr30k
  made_from: dict  # files and their sizes: another value is another data set
  units: list[records.TableUnit | records.TarUnit]
  rejections: list[Rejection] = []  # rows that no unit needs to see


def run(
  job: Job, out: str, options: records.Options, processes: int = 1, progress: bool = False
) -> dict:
  """Makes the data set and returns its manifest; goes on where an earlier run was interrupted."""
  directory, work = _places(job.name, out)
  plan = _plain({"name": job.name, "made from": job.made_from, **options.plan()})
  if (directory / "manifest.json").exists():
    manifest = json.loads((directory / "manifest.json").read_text())
    if manifest["plan"] != plan:
      raise ValueError(
        f"{directory} was prepared from other files or with other options; remove it first, or "
        "choose another --name or --out"
      )
    return manifest
  if options.strict and job.rejections:
    raise ValueError(str(job.rejections[0]))
  _claim(work, plan)
  todo = [n for n in range(len(job.units)) if not (work / f"{n:05d}.json").exists()]
  done = len(job.units) - len(todo)
  with tqdm(total=len(job.units), initial=done, unit=" parts", disable=not progress) as bar:
    for _ in _write(job.units, todo, work, options, processes):
      bar.update()
  return _finish(job, out, work, plan)


def _places(name, out):
  """Where the finished data set will be, and where the unfinished one is."""
  out = pathlib.Path(out).expanduser()
  return out / name / "1.0.0", out / "unfinished" / name.replace("/", "_")


def _plain(value):
  return json.loads(json.dumps(value))


def _claim(work, plan):
  """Parts of another plan are of no use; parts of this one are kept."""
  path = work / "plan.json"
  if path.exists() and json.loads(path.read_text()) != plan:
    shutil.rmtree(work)
  work.mkdir(parents=True, exist_ok=True)
  records.replace(path, json.dumps(plan))


def _write(units, todo, work, options, processes) -> Iterator[None]:
  """Writes the units of `todo`, yielding after each."""
  if processes == 1 or len(todo) <= 1:
    for n in todo:
      yield records.write(units[n], n, work, options)
    return
  context = multiprocessing.get_context("spawn")  # a fork would copy the locks of our threads
  pool = concurrent.futures.ProcessPoolExecutor(
    min(processes, len(todo)), context, initializer=signal.signal, initargs=_IGNORE_INTERRUPTS
  )
  try:
    futures = [pool.submit(records.write, units[n], n, work, options) for n in todo]
    for future in concurrent.futures.as_completed(futures):
      yield future.result()
  except BaseException as e:
    for worker in list((pool._processes or {}).values()):  # half a unit is no loss
      worker.terminate()
    if isinstance(e, concurrent.futures.process.BrokenProcessPool):
      raise ValueError(
        "a process was killed, probably for want of memory; the same command goes on, with "
        "--processes=1 in less memory"
      ) from e
    raise
  finally:
    pool.shutdown(cancel_futures=True)


_IGNORE_INTERRUPTS = (signal.SIGINT, signal.SIG_IGN)  # the main process stops the others


def _finish(job, out, work, plan):
  """Checks what was written, describes it, and hands it to TFDS."""
  summaries = [json.loads((work / f"{n:05d}.json").read_text()) for n in range(len(job.units))]
  rejections = job.rejections + [Rejection(*r) for s in summaries for r in s["rejections"]]
  shards, totals = collections.defaultdict(list), collections.defaultdict(collections.Counter)
  for number, summary in enumerate(summaries):
    for split, part in summary["splits"].items():
      path = work / records.shard_name(number, split)
      shards[split].append((str(path), part["images"], part["bytes"]))
      totals[split].update(part)
  reasons = collections.Counter(r.reason for r in rejections)
  reasons = {reason: reasons[reason] for reason in REASONS if reasons[reason]}
  if not shards:
    why = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items()) or "no rows at all"
    first = f"; first: {rejections[0]}" if rejections else ""
    raise ValueError(f"nothing is left of {job.name}: {why}{first}")
  near = _near_duplicates(work, len(job.units), list(shards))
  manifest = {
    "plan": plan,
    "splits": {split: dict(totals[split]) for split in shards},
    "kept": sum(t["pairs"] for t in totals.values()),
    "rejected": reasons,
    "near duplicates of train": {split: len(found) for split, found in near.items()},
  }
  records.replace(work / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
  _table(work / "rejected.tsv", Rejection._fields, rejections)
  pairs = [(split, *pair) for split, found in near.items() for pair in found]
  _table(work / "near_duplicates.tsv", ("split", "image", "image of train", "bits apart"), pairs)
  from xe_retrieval.data import datasets  # here: TensorFlow, which takes seconds to import

  files = [work / f for f in ("manifest.json", "rejected.tsv", "near_duplicates.tsv")]
  datasets.prepared(job.name, pathlib.Path(out).expanduser()).adopt(shards, files, work)
  shutil.rmtree(work)
  if not os.listdir(work.parent):
    work.parent.rmdir()
  return manifest


def _near_duplicates(work, units, splits):
  """{split: [(file, file of train, bits apart)]}; of pictures that were decoded."""
  loaded = {split: _fingerprints(work, units, split) for split in splits}
  if "train" not in loaded:
    return {}
  train, train_files = loaded.pop("train")
  return {
    split: [(files[i], train_files[j], bits) for i, j, bits in near_duplicates.find(own, train)]
    for split, (own, files) in loaded.items()
  }


def _fingerprints(work, units, split):
  """uint8 [n, 16] and the n file names of a split."""
  fingerprints, files = [np.zeros((0, 16), np.uint8)], []
  for n in range(units):
    path = work / records.fingerprints_name(n, split)
    if path.exists():
      with np.load(path, allow_pickle=False) as saved:
        fingerprints.append(saved["fingerprints"])
        files.append(saved["files"])
  return np.concatenate(fingerprints), np.concatenate(files) if files else np.zeros(0, "U1")


def _table(path, header, rows):
  lines = ["\t".join(" ".join(str(v).split()) for v in row) for row in (header, *rows)]
  records.replace(path, "\n".join(lines) + "\n")
