"""Prepare on Apache Beam: a step of a pipeline per unit, on a machine or on a cluster.

In `jobs` one process knows the keys of all images; here they are divided among workers, and this
process reads a line per unit. The data set is that of `jobs.run`, byte for byte.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Callable

import apache_beam as beam

from xe_retrieval.preparation import archives, claims, jobs, records
from xe_retrieval.preparation.beam import filesystems, steps
from xe_retrieval.preparation.beam.settings import Settings, silence
from xe_retrieval.preparation.rejections import Rejection

_REDUCED = "reduced.json"  # a line per unit, once all are compared
_MOST_BUCKETS = 4096  # of images that are compared: one per unit up to this


def run(
  job: jobs.Job,
  out: str,
  options: records.Options,
  register: Callable,
  settings: Settings,
  progress: bool = False,
) -> dict:
  """jobs.run on a runner of Beam's; `out` may be on any filesystem that Beam knows.

  Remotely, two runs at a time are not kept apart: they write the same files.
  """
  settings.use()
  remote = archives.is_remote(out)
  out = str(out) if remote else os.path.abspath(os.path.expanduser(out))
  directory, work = _places(job.name, out)
  plan = jobs.plan(job, options)
  if not (manifest := jobs.finished(directory, plan)):
    lock = claims.alone(pathlib.Path(str(work)), job.name)
    with contextlib.nullcontext() if remote else lock:
      manifest = jobs.finished(directory, plan)
      manifest = manifest or _make(job, out, work, plan, options, register, settings, progress)
  return manifest


def _make(job, out, work, plan, options, register, settings, progress):
  jobs.refuse_rejections(job, options)
  _claim(work, plan)
  reduced, results = work / _REDUCED, []
  if job.units and not reduced.exists():
    for number, unit in enumerate(job.units):
      (work / f"units/{number:05d}.json").write_text(steps.pack(unit))
    (work / steps.ERROR).unlink()
    with _progress(work, len(job.units), progress):
      _run(_pipeline(work, len(job.units), options, settings), work, settings)
  if job.units:
    results = json.loads(reduced.read_text())
  outcome = _outcome(job, results)
  if options.strict and outcome.first:
    raise ValueError(outcome.first)
  made = jobs.manifest(job, plan, outcome)
  _publish(job, out, work, made, results, register)
  work.rmtree()
  return made


def _places(name, out):
  """jobs.places on any filesystem."""
  root = filesystems.Path(out)
  return tuple(root / os.path.relpath(path, "/") for path in jobs.places(name, "/"))


def _claim(work, plan):
  path = work / "plan.json"
  if path.exists():
    begun = bool(work.names("[0-9]*.json"))
    if claims.conflicts(work, json.loads(path.read_text()), plan, begun):
      work.rmtree()
  path.write_text(json.dumps(plan))


def _pipeline(work, units, options, settings):
  pipeline = settings.pipeline()
  given = work, options, min(units, _MOST_BUCKETS), settings.arguments
  written = (
    pipeline
    | "units" >> beam.Create(range(units))
    | "distribute" >> beam.Reshuffle()
    | "write" >> beam.ParDo(steps.Write(*given))
    | "written" >> beam.Reshuffle()  # what follows may be repeated without decoding again
  )
  keys = written | "keys" >> beam.ParDo(steps.Keys(*given)).with_outputs(main="buckets")
  facts = keys.buckets | beam.GroupByKey() | "compare" >> beam.ParDo(steps.Compare(*given))
  near = (
    keys.train
    | "near" >> beam.ParDo(steps.Near(*given), beam.pvalue.AsList(keys.held_out))
    | "nearest" >> beam.CombinePerKey(min)
    | "near facts" >> beam.Map(steps.near_fact)
  )
  every = written | "every unit" >> beam.Map(lambda number: (number, ("unit", None)))
  _ = (
    (every, facts, near)
    | beam.Flatten()
    | "by unit" >> beam.GroupByKey()
    | "finish" >> beam.ParDo(steps.Finish(*given))
    | "all" >> beam.combiners.ToList()
    | "save" >> beam.Map(_save, work / _REDUCED)
  )
  return pipeline


def _save(results, path):
  path.write_text(json.dumps(sorted(results, key=lambda result: result["unit"])))


def _run(pipeline, work, settings):
  """Runs it to the end; ValueError with the reason that a worker left, or Beam's."""
  running = None
  try:
    with silence() if settings.quiet else contextlib.nullcontext():
      running = pipeline.run()
      running.wait_until_finish()
  except KeyboardInterrupt:
    if running is not None:
      running.cancel()
    raise
  except Exception as e:
    if (work / steps.ERROR).exists():
      raise ValueError((work / steps.ERROR).read_text()) from e
    lines = str(e).strip().splitlines()
    why = re.sub(r" \[while running .*", "", lines[-1])[:300] if lines else type(e).__name__
    raise ValueError(
      f"--runner={settings.runner} has stopped: {why}; run the same command to resume, "
      "with --verbosity=0 for Beam's logs"
    ) from e


@contextlib.contextmanager
def _progress(work, units, shown):
  """Shows how many units are written, by looking for them: runners tell nothing in common."""
  ended = threading.Event()
  with jobs.bar(units, len(work.names("[0-9]*.json")), shown) as bar:

    def look():
      while not ended.wait(10 if archives.is_remote(work) else 0.5):
        with contextlib.suppress(Exception):  # a later look may succeed
          bar.update(len(work.names("[0-9]*.json")) - bar.n)

    thread = threading.Thread(target=look, daemon=True)
    if shown:
      thread.start()
    try:
      yield
      bar.update(units - bar.n)
    finally:
      ended.set()
      if shown:
        thread.join()


def _outcome(job, results):
  splits, near, rejected = {}, {}, collections.Counter(r.reason for r in job.rejections)
  for result in results:
    rejected.update(result["rejected"])
    for split, part in result["splits"].items():
      total = splits.setdefault(split, dict.fromkeys(("images", "pairs", "bytes"), 0))
      total |= {name: total[name] + part[name] for name in total}
      near[split] = near.get(split, 0) + part["near"]
  near = {split: near[split] for split in splits if split != "train" and "train" in splits}
  parts = ("rejected", *splits)
  first = [r["first"][part] for part in parts for r in results if part in r["first"]]
  first = [*map(str, job.rejections[:1]), *first, ""]
  return jobs.Outcome(splits, rejected, first[0], near)


def _publish(job, out, work, made, results, register):
  splits = made["splits"]
  shards = {
    split: [
      (str(work / part["shard"]), part["images"], part["bytes"])
      for result in results
      if (part := result["splits"].get(split)) and part["shard"]
    ]
    for split in splits
  }
  with tempfile.TemporaryDirectory() as directory:
    local = pathlib.Path(directory)
    (local / "manifest.json").write_text(jobs.as_text(made), encoding="utf-8")
    _tables(job, work, results, splits, local)
    files = [local / name for name in jobs.TABLES]
    if archives.is_remote(out):
      _upload(job, out, shards, files, local, register)
    else:
      register(job.name, pathlib.Path(out), shards, files, local)


def _tables(job, work, results, splits, local):
  """Joins the lines that units have written, in the order of `jobs`."""

  def copied(file, part, named):
    for result in results:
      if named(result):
        with filesystems.opened(str(work / f"{result['unit']:05d}.{part}.tsv")) as lines:
          while block := lines.read(1 << 20):
            file.write(block)

  with (local / "rejected.tsv").open("wb") as file:
    lines = records.table_lines([Rejection._fields, *job.rejections])
    file.write(lines.encode("utf-8", "backslashreplace"))
    for part in ("rejected", *splits):
      name = part if part == "rejected" else f"{part}.repeated"
      copied(file, name, lambda result, part=part: part in result["first"])
  with (local / "near_duplicates.tsv").open("wb") as file:
    file.write(records.table_lines([jobs.NEAR_FIELDS]).encode())
    for split in splits:
      near = f"{split}.near"
      copied(file, near, lambda r, split=split: r["splits"].get(split, {}).get("near"))


def _upload(job, out, shards, files, local, register):
  """Registers the data set without its shards on this machine, then copies all to their place."""
  target, _ = _places(job.name, out)
  target.rmtree()  # of an upload that was interrupted
  names = register(job.name, local / "out", shards, files, local)
  for split, parts in shards.items():
    for (path, _, _), name in zip(parts, names[split], strict=True):
      filesystems.Path(path).copy(target / name)
  made = jobs.places(job.name, local / "out")[0]
  # The manifest is the last: it says that the data set is complete.
  for path in sorted(made.iterdir(), key=lambda path: path.name == "manifest.json"):
    (target / path.name).adopt(path)
