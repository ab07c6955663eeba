"""Kills embed at random moments: is any picture lost, there twice, or half written?

  python -m benchmarks.kills_embed [--kills=100] [--pictures=6000] [--minutes=60] [--seed=0]

A part is embedded by `python -m xe_retrieval.embed`, killed by SIGKILL, and started again until it
is done; half of the kills come at any moment of the process, half once it has begun to embed. After
each kill every file of the part has to be whole. When all parts are done, each picture has to be
there once, with the vector of a run that was never stopped; then all begins anew.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

from xe_retrieval.data import shapes
from xe_retrieval.embed import directory, vector_files

ROOT = pathlib.Path(__file__).parents[1]
PARTS = 2
TINY = (
  *("text.layers=1", "text.width=16", "text.heads=2", "text.mlp=16", "image.size=16"),
  *("image.stem_width=8", "embedding_dim=8", "steps=1", "eval_every=1", "checkpoint_every=1"),
  *("batch_size=16", "text.warmup_steps=1", "image.warmup_steps=1", "data.name=shapes/64"),
)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--pictures", type=int, default=6000)
  parser.add_argument("--minutes", type=float, default=60)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--workdir", default="", help="A model; by default a tiny one is trained.")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as root:
    sys.exit(_run(args, pathlib.Path(root)))


def _run(args, root):
  workdir, photos, chance = args.workdir or _train(root), root / "photos", random.Random(args.seed)
  _draw(photos, args.pictures)
  started = time.time()
  for number in range(1, PARTS + 1):
    _start(workdir, photos, root / "whole", number).wait()
  seconds = (time.time() - started) / PARTS
  expected = _rows(root / "whole")
  print(f"{len(expected):,} pictures in {PARTS} parts, {seconds:.0f} s a part", flush=True)
  end, kills, early, unusable, wrong, rounds = time.time() + 60 * args.minutes, 0, 0, 0, 0, 0
  while kills < args.kills and time.time() < end:
    out = root / f"{rounds}"
    for number in range(1, PARTS + 1):
      while not directory.marker(out, number, PARTS).exists():
        process = _start(workdir, photos, out, number)
        if kills < args.kills and time.time() < end:
          begun = _wait(process, out, number, chance, seconds)
          if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills, early = kills + 1, early + (not begun)
        code = process.wait()
        if code not in (0, -signal.SIGKILL):
          unusable += 1
          print(f"part {number} ended with {code}: {process.stderr.read().decode()[-500:]}")
          if unusable > 3:
            return 1
        wrong += _half_files(out, number)
    difference = _difference(_rows(out), expected)
    wrong += difference is None
    rounds += 1
    shown = "OTHER PICTURES" if difference is None else f"largest difference {difference:.2g}"
    print(f"round {rounds}, {kills} kills so far: {shown}", flush=True)
  print(
    f"{kills} kills ({early} before embedding began) in {rounds} rounds: {unusable} runs that "
    f"could not go on, {wrong} rounds or files with lost, repeated or half-written pictures"
  )
  return bool(unusable or wrong)


def _start(workdir, photos, out, number):
  command = [
    *(sys.executable, "-m", "xe_retrieval.embed", f"--workdir={workdir}", f"--images={photos}"),
    *(f"--out={out}", f"--part={number}/{PARTS}"),
  ]
  pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
  return subprocess.Popen(command, cwd=ROOT, **pipes)


def _wait(process, out, number, chance, seconds):
  """Until the moment of the kill; -> whether it had begun to embed."""
  folder = directory.folder(out, number, PARTS)
  if chance.random() < 0.5:
    _sleep(process, chance.uniform(0, seconds))
    return folder.exists()
  before = len(list(folder.glob("*.parquet"))) if folder.exists() else None
  while process.poll() is None and (before is None and not folder.exists()):
    time.sleep(0.01)
  if before is not None:  # the folder is there from before: wait about as long as start-up takes
    _sleep(process, 0.5 * seconds)
  _sleep(process, chance.uniform(0, 0.5 * seconds))
  return True


def _sleep(process, seconds):
  end = time.time() + seconds
  while process.poll() is None and time.time() < end:
    time.sleep(0.005)


def _half_files(out, number):
  """Files of a part that are not whole, and pictures that are in more than one of them."""
  folder = directory.folder(out, number, PARTS)
  if not folder.exists():
    return 0
  kind, wrong, ids = vector_files.schema(directory.read_plan(out).width), 0, []
  for path in folder.iterdir():
    if vector_files.is_chunk(path.name):
      try:
        ids += vector_files.read(folder, path.name, kind)[0].rows["id"].tolist()
      except ValueError as e:
        print(e)
        wrong += 1
  return wrong + (len(ids) != len(set(ids)))


def _rows(out):
  """{name: vector}; None if a picture is there twice."""
  plan, found, count = directory.read_plan(out), {}, 0
  for number in range(1, PARTS + 1):
    done = directory.read_done(out, plan, number)
    for _, table in directory.read_files(out, plan, done):
      names, vectors = table["name"].to_pylist(), vector_files.vectors(table)
      found |= dict(zip(names, vectors, strict=True))
      count += len(names)
  return found if count == len(found) else None


def _difference(found, expected):
  if found is None or found.keys() != expected.keys():
    return None
  largest = max(np.abs(found[name] - vector).max() for name, vector in expected.items())
  return largest if largest < 1e-5 else None


def _draw(folder, count):
  """Scenes in folders, some with names that are hard to take."""
  drawn = []
  for i in range(count):
    path = folder / f"{i % 7}" / (f"new\nline{i}.png" if i % 100 == 0 else f"scene{i:06d}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    if i < 500:
      Image.fromarray(shapes.render(shapes.scene(0, "test", i))).save(path)
      drawn.append(path.read_bytes())
    else:
      path.write_bytes(drawn[i % 500])
  (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(drawn[0])


def _train(root):
  fields = [f"--config.{field}" for field in TINY]
  command = [
    *(sys.executable, "-m", "xe_retrieval.main", "--config=configs/quickstart.py"),
    *(f"--workdir={root / 'model'}", f"--config.data.dir={root / 'data'}", *fields),
    *("--config.image.depths=(1,)", "--config.image.widths=(16,)"),
  ]
  subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
  return root / "model"


if __name__ == "__main__":
  main()
