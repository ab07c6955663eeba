"""How fast is embed, beside the image tower alone?

  python -m benchmarks.embed --workdir=runs/mine --images=photos/ [--count=2000] [--repetitions=3]

Embeds `count` pictures of a folder as one part: walking, reading, decoding, the tower, files. The
tower alone gets the same number of batches of the same size, decoded before. Both are repeated in
turns, and the best of each is taken; a first run, which compiles, is not counted.
"""

import argparse
import itertools
import pathlib
import resource
import tempfile
import time

import jax
import numpy as np

import xe_retrieval
from xe_retrieval import model as models
from xe_retrieval.data import decoding
from xe_retrieval.embed import part
from xe_retrieval.preparation import cores
from xe_retrieval.search import image_sources

HELD = 4  # batches of decoded pixels, which the tower gets again and again


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--workdir", required=True)
  parser.add_argument("--images", required=True, help="A folder.")
  parser.add_argument("--count", type=int, default=2000)
  parser.add_argument("--repetitions", type=int, default=3)
  args = parser.parse_args()
  model = xe_retrieval.load(args.workdir)
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    source, count = _some(args.images, args.count, root / "pictures")
    whole = [_embed(model, source, root / "first", count)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tower = _tower(model, source, count)
    tower()
    whole, alone = [], []
    for i in range(args.repetitions):
      whole.append(_embed(model, source, root / f"{i}", count))
      alone.append(tower())
  print(f"{count:,} pictures, {cores.available()} cores, batches of {models.BATCH}")
  for name, found in (("embed", whole), ("tower alone", alone)):
    runs = ", ".join(f"{rate:.2f}" for rate in found)
    print(f"{name:12} {max(found):10,.2f} images/s   (runs: {runs})")
  print(f"embed / tower alone: {max(whole) / max(alone):.3f}")
  print(f"peak memory of the first embed, with start-up: {peak:.2f} GiB")


def _some(folder, count, out):
  """Links to the first pictures of a folder, as a folder of their own."""
  out.mkdir()
  entries = list(itertools.islice(image_sources.Folder(folder).entries(), count))
  for number, entry in enumerate(entries):
    file = pathlib.Path(folder).resolve() / entry.name
    (out / f"{number:08d}{file.suffix}").symlink_to(file)
  if not entries:
    raise SystemExit(f"{folder} holds no pictures")
  return image_sources.Folder(out), len(entries)


def _embed(model, source, out, count):
  start = time.perf_counter()
  report = part.run(model, source, out, 1, 1)
  seconds = time.perf_counter() - start
  if report.done.skipped:
    print(f"{report.done.skipped} are no pictures")
  return count / seconds


def _tower(model, source, count):
  """-> a function that runs the tower over `count` pictures in memory -> images/s."""
  view, size = decoding.View.of(model.config.image), min(models.BATCH, count)
  size = 1 << (size - 1).bit_length()  # as embed does for a handful
  encoder, squares = model._encoders(size), []
  for entry in itertools.islice(source.entries(), HELD * size):
    try:
      squares.append(decoding.square(source.read(entry.name), view=view))
    except ValueError:
      continue
  held = [np.stack(squares[i : i + size]) for i in range(0, len(squares), size)]
  padded = [np.pad(b, [(0, size - len(b)), (0, 0), (0, 0), (0, 0)]) for b in held]
  on_device = [jax.device_put(b, encoder._rows) for b in padded]

  def run():
    start = time.perf_counter()
    for i in range(-(-count // size)):
      encoder._image(encoder.variables, on_device[i % len(on_device)]).block_until_ready()
    return count / (time.perf_counter() - start)

  return run


if __name__ == "__main__":
  main()
