"""Units of work → a finished TFDS data set: in parallel, resumable, published atomically."""

import collections
import concurrent.futures
import itertools
import json
import multiprocessing
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from xe_retrieval.preparation import claims, duplicates, records
from xe_retrieval.preparation.rejections import REASONS, Rejection


class Job(NamedTuple):
  """A data set to make: its name, inputs and units of work."""

  name: str  # captions/<name>, conceptual_captions or flickr30k
  made_from: dict  # input files with their hash or size, and a stamp of the images
  units: list[records.TableUnit | records.TarUnit]
  rejections: list[Rejection] = []  # rows rejected while reading the table


class Outcome(NamedTuple):
  """What all units together have become; the tables of lines lie in the directory of the work."""

  splits: dict[str, dict]  # images, pairs and bytes
  rejected: dict[str, int]  # by reason
  first: str  # of the rejections
  near: dict[str, int]  # images of other splits that look like images of train


def run(
  job: Job,
  out: str,
  options: records.Options,
  register: Callable,
  processes: int = 1,
  progress: bool = False,
) -> dict:
  """Makes the data set and returns its manifest; resumes an interrupted run.

  `register` turns the finished shards into a TFDS data set (datasets.register).
  """
  directory, work = places(job.name, out)
  job_plan = plan(job, options)
  if not (manifest := finished(directory, job_plan)):
    with claims.alone(work, job.name):
      manifest = finished(directory, job_plan)  # perhaps meanwhile
      manifest = manifest or _make(job, out, work, job_plan, options, register, processes, progress)
  return manifest


def plan(job: Job, options: records.Options) -> dict:
  """What the data set is made of, as JSON returns it: tuples become lists."""
  return json.loads(json.dumps({"name": job.name, "made from": job.made_from, **options.plan()}))


def finished(directory, plan):
  """The manifest of a data set that exists; ValueError if it was made of something else."""
  path = directory / "manifest.json"
  manifest = json.loads(path.read_text()) if path.exists() else None
  if manifest and (changed := claims.differences(manifest["plan"], plan)):
    raise ValueError(
      f"{directory} was prepared from other files or with other options ({'; '.join(changed)}); "
      "remove it first, or choose another --name or --out"
    )
  return manifest


def _make(job, out, work, plan, options, register, processes, progress):
  refuse_rejections(job, options)
  claims.claim(work, plan)
  todo = [n for n in range(len(job.units)) if not (work / f"{n:05d}.json").exists()]
  done = len(job.units) - len(todo)
  with bar(len(job.units), done, progress) as shown:

    def report(images):
      shown.set_postfix_str(f"{images:,} images", refresh=False)
      shown.update(0)

    for _ in _write(job.units, todo, work, options, processes, report):
      shown.update()
  return _finish(job, out, work, plan, options.strict, register)


def refuse_rejections(job: Job, options: records.Options) -> None:
  if options.strict and job.rejections:
    raise ValueError(str(job.rejections[0]))


def bar(total: int, done: int, progress: bool) -> tqdm:
  """Shows how many units are written."""
  # The mean speed: tqdm's recent one leaves out the time of updates in which no part ended.
  shown = dict(bar_format=_BAR, miniters=0, disable=not progress)
  return tqdm(total=total, initial=done, smoothing=0, **shown)


_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} parts{postfix} [{elapsed}<{remaining}]"


def places(name, out):
  """Directories of the finished data set and of the unfinished work."""
  out = pathlib.Path(out).expanduser()
  return out / name / "1.0.0", out / "unfinished" / name.replace("/", "_")


def _write(units, todo, work, options, processes, report) -> Iterator[None]:
  """Writes the units of `todo`, yielding after each; calls `report` with the number of images."""
  if processes == 1 or len(todo) <= 1:
    count = itertools.count(1)
    for n in todo:
      yield records.write(units[n], n, work, options, lambda: report(next(count)))
    return
  context = multiprocessing.get_context("spawn")  # forking a process with threads can deadlock
  images = context.Value("q", 0)
  pool = concurrent.futures.ProcessPoolExecutor(
    min(processes, len(todo)), context, initializer=_start, initargs=(images,)
  )
  try:
    waiting = {pool.submit(_write_one, units[n], n, work, options) for n in todo}
    while waiting:
      done, waiting = concurrent.futures.wait(waiting, 0.5, concurrent.futures.FIRST_COMPLETED)
      report(images.value)
      for future in done:
        yield future.result()
  except BaseException as e:
    for worker in list((pool._processes or {}).values()):  # unfinished units are written again
      worker.terminate()
    if isinstance(e, concurrent.futures.process.BrokenProcessPool):
      raise ValueError(
        "a worker process was killed, probably out of memory; run the same command to resume, "
        "with --processes=1 to use less"
      ) from e
    raise
  finally:
    pool.shutdown(cancel_futures=True)


def _start(images):
  """Initialises a worker process."""
  global _images
  _images = images
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the others


def _write_one(unit, number, work, options):
  def count():
    with _images.get_lock():
      _images.value += 1

  records.write(unit, number, work, options, count)


def _finish(job, out, work, plan, strict, register):
  """Drops duplicates between units, writes manifest and tables, publishes the data set."""
  summaries = [json.loads((work / f"{n:05d}.json").read_text()) for n in range(len(job.units))]
  rejections = job.rejections + [Rejection(*r) for s in summaries for r in s["rejections"]]
  splits = dict.fromkeys(split for summary in summaries for split in summary["splits"])
  keys = {split: duplicates.load(work, len(job.units), split) for split in splits}
  repeated = {split: duplicates.repeated(keys[split]) for split in splits}
  rejections += [
    r
    for s in splits
    for i in repeated[s]
    for r in duplicates.rejections(job.units[keys[s].unit[i]], keys[s], i)
  ]
  if strict and rejections:
    raise ValueError(str(rejections[0]))
  totals = {split: duplicates.total(keys[split], repeated[split]) for split in splits}
  others = [split for split in splits if split != "train" and "train" in splits]
  near = {split: duplicates.between(keys[split], keys["train"]) for split in others}
  first = str(rejections[0]) if rejections else ""
  reasons = collections.Counter(r.reason for r in rejections)
  outcome = Outcome(totals, reasons, first, {split: len(found) for split, found in near.items()})
  made = manifest(job, plan, outcome)
  shards = {split: _shards(work, split, keys[split], repeated[split]) for split in splits}
  records.replace(work / "manifest.json", as_text(made))
  records.replace(work / "rejected.tsv", records.table_lines([Rejection._fields, *rejections]))
  pairs = [(split, *pair) for split, found in near.items() for pair in found]
  records.replace(work / "near_duplicates.tsv", records.table_lines([NEAR_FIELDS, *pairs]))
  files = [work / name for name in TABLES]
  register(job.name, pathlib.Path(out).expanduser(), shards, files, work)
  shutil.rmtree(work)
  return made


TABLES = ("manifest.json", "rejected.tsv", "near_duplicates.tsv")
NEAR_FIELDS = ("split", "image", "image of train", "bits apart")


def manifest(job: Job, plan: dict, outcome: Outcome) -> dict:
  """ValueError if nothing is left."""
  reasons = {reason: outcome.rejected[reason] for reason in REASONS if outcome.rejected[reason]}
  if not outcome.splits:
    why = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items()) or "no rows at all"
    first = f"; first: {outcome.first}" if outcome.first else ""
    raise ValueError(f"nothing is left of {job.name}: {why}{first}")
  return {
    "plan": plan,
    "splits": outcome.splits,
    "kept": sum(total["pairs"] for total in outcome.splits.values()),
    "rejected": reasons,
    "near duplicates of train": outcome.near,
  }


def as_text(made: dict) -> str:
  return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def _shards(work, split, keys, repeated):
  """[(path, records, bytes)] of a split, without duplicates."""
  out = []
  for unit in np.unique(keys.unit):
    path = work / records.shard_name(unit, split)
    own = keys.unit == unit
    twice = repeated[keys.unit[repeated] == unit]
    if len(twice):
      # The whole shard stays until the work is removed: a run on Beam may resume it.
      path = duplicates.without(path, set(keys.row[twice].tolist()))
    size = keys.sizes[own].sum() - keys.sizes[twice].sum()
    if own.sum() > len(twice):
      out.append((str(path), int(own.sum()) - len(twice), int(size)))
  return out
