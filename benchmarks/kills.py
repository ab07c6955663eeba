"""Kills commands over and over, at random moments, and checks that nothing is lost or twice.

  python -m benchmarks.kills index|embed [--kills=100] [--seed=0] [--pictures=240]

`index` brings folders of drawn pictures into a collection, changes and removes some of them, and so
on; each of these runs is killed (SIGKILL) until it finishes. After each kill, the collection has to
open, and to hold all that was there before the run or all that is to be there after it. When a run
has finished, each image is there exactly once, with the vector that a run without kills gives.
`embed` writes parts and brings them up to date: the same, and no file is ever half written.

Lives are forks of one process without a device; a kill comes after a random part of the time that
the work takes, which begins when the model is loaded.
"""

import argparse
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

import jax
import numpy as np
import transformers  # noqa: F401  for the forks
from PIL import Image

import xe_retrieval
from tests.search import conftest
from xe_retrieval.calibration import run  # noqa: F401
from xe_retrieval.data import cpu_tensorflow, paths, shapes  # noqa: F401
from xe_retrieval.embed import directory, embedding_loop, part, vector_files
from xe_retrieval.search import image_sources, update
from xe_retrieval.search.collection import MANIFEST, Collection
from xe_retrieval.search.stores import files

TOLERANCE = 1e-5  # of vectors: pictures are embedded in other batches after a kill


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("command", choices=COMMANDS)
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--pictures", type=int, default=240, help="of each folder")
  parser.add_argument("--folder", help="where it works; by default in TMPDIR")
  args = parser.parse_args()
  began, kills, rounds, wrong = time.time(), 0, 0, []
  with tempfile.TemporaryDirectory(dir=args.folder) as root:
    root = pathlib.Path(root)
    jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    (root / "model").mkdir()
    forked(lambda: conftest.make_workdir(root / "model") and None)
    while kills < args.kills and not wrong:
      chance = random.Random(f"{args.seed} {rounds}")
      job = COMMANDS[args.command](root / f"round{rounds}", root / "model", args.pictures, chance)
      for step in job.steps():
        seconds = job.reference(step)
        while True:
          killed = life(functools.partial(job.work, step), chance.uniform(0, 1.1 * seconds))
          kills, seconds = kills + killed, 1.05 * seconds  # the machine may be busier by now
          wrong += [f"{step['name']}: {x}" for x in job.check(step, killed)]
          if not killed or wrong:
            break
        print(f"{kills:4} kills, {step['name']}: {'; '.join(wrong) or 'fine'}", flush=True)
        if wrong:
          break
      shutil.rmtree(job.root)
      rounds += 1
  print(
    f"{kills} kills of {args.command} in {rounds} rounds and {time.time() - began:,.0f} s: "
    f"{len(wrong)} things wrong"
  )
  sys.exit(bool(wrong))


class Index:
  """A round: sources come, change and go. Small limits make it cut, merge and hash on the way."""

  def __init__(self, root, workdir, pictures, chance):
    self.root, self.workdir, self.pictures, self.chance = root, workdir, pictures, chance
    self.kind, self.held = chance.choice(("exact", "scann")), {}
    root.mkdir()

  def steps(self):
    """Yields what `index` is asked for, after changing the folders."""
    one, other, n = self.root / "photos", self.root / "more", self.pictures
    draw(one, range(n))
    yield {"name": f"a folder ({self.kind})", "add": [one]}
    draw(other / "deep\ner", range(n, 2 * n))
    yield {"name": "another folder", "add": [other]}
    change(one, n // 3, self.chance)
    draw(one / "late", range(2 * n, 2 * n + n // 2))
    yield {"name": "changes in both", "add": [one, other]}
    yield {"name": "all anew", "add": [], "rebuild": True}
    yield {"name": "without the other", "add": [], "remove": [other]}

  def work(self, step, out="index", report=None):
    files.LARGEST, files.EXACT_BELOW, files.MOST_SMALL = self.pictures, 100, 2
    update.CHUNK = 16
    model = xe_retrieval.load(self.workdir)
    model.embed_squares([np.zeros((16, 16, 16, 3), np.uint8)], 16)  # compiled
    start = time.perf_counter()
    begun()
    add, remove = ([image_sources.Folder(p) for p in step.get(x, ())] for x in ("add", "remove"))
    if (self.root / out / MANIFEST).exists():  # else a life that was killed late has removed it
      held = {about["key"] for about in Collection(self.root / out).manifest["sources"]}
      remove = [source for source in remove if source.key in held]
    options = {"kind": self.kind, "rebuild": step.get("rebuild", False)}
    update.update_index(self.root / out, model, self.workdir, add, remove, **options)
    return time.perf_counter() - start

  def reference(self, step) -> float:
    """The same without a kill, beside it -> its seconds."""
    seconds = forked(lambda: self.work(step, "reference"))
    self.before = self.held
    self.held = forked(lambda: contents(self.root / "reference"))[0]
    return seconds

  def check(self, step, killed) -> list[str]:
    """What is wrong."""
    found = forked(lambda: contents(self.root / "index"))
    if found is None:
      return ["there is no collection"] if self.before or not killed else []
    held, twice = found
    wrong = [f"{name} is there twice" for name in twice]
    if killed and same(held, self.before):
      return wrong
    if not same(held, self.held):
      missing, more = self.held.keys() - held.keys(), held.keys() - self.held.keys()
      wrong.append(f"{len(missing)} images missing, {len(more)} too many, or with other vectors")
    if not killed and (self.root / "index" / "partial").exists():
      wrong.append("chunks are left behind")
    return wrong


class Embed:
  """A round: two parts are embedded, then brought up to date after pictures have changed."""

  def __init__(self, *given):
    self.root, self.workdir, self.pictures, self.chance, self.done = *given, {}
    self.root.mkdir()

  def steps(self):
    photos, n = self.root / "photos", self.pictures
    draw(photos, range(n))
    draw(photos / "deep\ner", range(n, 2 * n))
    for what in ("", ", changed"):
      yield from ({"name": f"part {number}/2{what}", "part": number} for number in (1, 2))
      change(photos, n // 3, self.chance)

  def work(self, step, out="vectors"):
    part.CHUNK = embedding_loop.models.BATCH = 16
    model = xe_retrieval.load(self.workdir)
    model.embed_squares([np.zeros((16, 16, 16, 3), np.uint8)], 16)  # compiled
    start = time.perf_counter()
    begun()
    source = image_sources.Folder(self.root / "photos")
    part.run(model, source, self.root / out, step["part"], 2, update=True)
    return time.perf_counter() - start

  def reference(self, step) -> float:
    seconds = forked(lambda: self.work(step, "reference"))
    self.before = self.done.get(number := step["part"])
    self.done[number] = self.held = dict(forked(lambda: rows(self.root / "reference", number)))
    return seconds

  def check(self, step, killed) -> list[str]:
    out, number = self.root / "vectors", step["part"]
    folder, kind = directory.folder(out, number, 2), vector_files.schema(8)
    _ = [vector_files.read(folder, p.name, kind) for p in folder.glob("*.parquet")]  # all whole
    if killed and not directory.marker(out, number, 2).exists():
      return []
    held = dict(found := rows(out, number))
    wrong = ["pictures are there twice"] * (len(held) != len(found))
    if not (same(held, self.held) or killed and same(held, self.before or {})):
      wrong.append("pictures are missing, too many, or with other vectors")
    left = [] if killed else folder.glob(f".*{paths.PARTIAL}")
    return wrong + [f"{path.name} is left behind" for path in left]


def rows(out, number):
  """[(name, vector)] of a part that is done."""
  done = directory.read_done(out, plan := directory.read_plan(out), number)
  lists = (t.to_pydict() for _, t in directory.read_files(out, plan, done))
  return [(os.fsdecode(n), v) for t in lists for n, v in zip(t["name"], t["vector"], strict=True)]


COMMANDS = {"index": Index, "embed": Embed}


def contents(path):
  """({"source/name": vector}, names that are there twice) of a collection; None: there is none."""
  if not (path / MANIFEST).exists():
    return None
  index = Collection(path)
  out, twice = {}, []
  for label in index.sources:
    ids, _ = index.store.known(label)
    names = index.store.fetch(ids, ("name",))["name"]
    for name, vector in zip(names, index.store.vectors(ids).tolist(), strict=True):
      name = f"{label}/{os.fsdecode(name)}"
      twice += [name] * (name in out)
      out[name] = vector
  assert len(index) == len(index.store) == len(out) + len(twice)
  index.store.nearest(np.ones((1, index.store.width), np.float32), 5)  # ScaNN's files are whole
  return out, twice


def same(one, other) -> bool:
  return one.keys() == other.keys() and all(
    np.abs(np.subtract(one[name], other[name])).max() < TOLERANCE for name in one
  )


def draw(folder, numbers):
  folder.mkdir(parents=True, exist_ok=True)
  for i in numbers:
    picture = Image.fromarray(shapes.render(shapes.scene(0, "test", i)))
    picture.resize((32, 32)).save(folder / f"{i:05d}.png")


def change(folder, count, chance):
  for path in chance.sample(sorted(folder.glob("*.png")), count):
    if chance.random() < 0.5:
      path.unlink()
    else:
      Image.new("RGB", (40, 40), chance.choice(("red", "blue", "green"))).save(path)


# ---- forks ----

_pipe = None  # of a life: where it says that its work begins, and what it returns


def begun():
  os.write(_pipe, b"\n")


def life(work, seconds) -> bool:
  """Runs `work` in a fork that is killed `seconds` after it has begun; False: it ended before."""
  read, pid = _fork(work)
  with os.fdopen(read, "rb") as file:
    if file.read(1) == b"\n":
      time.sleep(seconds)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
      os.kill(pid, signal.SIGKILL)
      _, status = os.waitpid(pid, 0)
  if os.WIFSIGNALED(status):
    return True
  if os.WEXITSTATUS(status):
    raise SystemExit("a life failed by itself")
  return False


def forked(work):
  """What `work` returns, run in a fork: this process starts no device and no threads."""
  read, pid = _fork(work)
  with os.fdopen(read, "rb") as file:
    said = file.read().lstrip(b"\n")
  if os.waitpid(pid, 0)[1]:
    raise SystemExit("a fork failed")
  return json.loads(said)


def _fork(work):
  global _pipe
  read, write = os.pipe()
  sys.stdout.flush()
  pid = os.fork()
  if pid:
    os.close(write)
    return read, pid
  code = 1
  try:
    os.close(read)
    _pipe = write
    with open(os.devnull, "w") as nowhere:
      sys.stderr, kept = nowhere, sys.stderr
      try:
        found = work()
      finally:
        sys.stderr = kept
    data = json.dumps(found).encode()
    while data:
      data = data[os.write(write, data) :]
    code = 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


if __name__ == "__main__":
  main()
