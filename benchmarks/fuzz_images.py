"""Mutated images through `prepare` and the input pipeline: each is kept or rejected with a reason.

  python -m benchmarks.fuzz_images [--count=10000] [--seed=0]

Every format is mutated in every way equally often. The suite runs `check` with a few hundred.
"""

import argparse
import io
import pathlib
import resource
import struct
import tarfile
import tempfile
import zlib

import numpy as np
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import pipeline
from xe_retrieval.preparation import records

MAX_SIDES = (32, 384, None)  # resize, keep or re-encode, copy
MUTATIONS = 7


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--count", type=int, default=10_000)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  for max_side in MAX_SIDES:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as directory:
      manifest = check(pathlib.Path(directory), args.count, max_side, args.seed)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
      f"--max_side={max_side}: kept {manifest['kept']:,}, {manifest['rejected']}, +{grown:,} kB"
    )
    assert grown < 500_000, "memory grows with the number of images"


def check(directory: pathlib.Path, count: int, max_side: int | None, seed: int = 0) -> dict:
  """Prepares `count` mutated images, reads back those that are kept, and returns the manifest."""
  path = directory / "shard.tar"
  with tarfile.open(path, "w") as tar:
    for n, image in enumerate(mutants(count, seed)):
      for name, content in ((f"{n:06d}.jpg", image), (f"{n:06d}.txt", b"caption %d" % n)):
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
  options = records.Options(max_side, max_pixels=1_000_000, shares=(("train", 1.0),))
  manifest = prepare.prepare(prepare.webdataset([str(path)], "fuzz"), directory, options)
  assert manifest["kept"] + sum(manifest["rejected"].values()) == count
  assert manifest["kept"] > count // 10 and manifest["rejected"]["not an image"] > count // 10
  source = pipeline.Source("captions/fuzz", str(directory), "train")
  shown = np.concatenate(list(pipeline.image_batches(source, 16, pipeline.spans(len(source), 256))))
  assert shown.shape == (manifest["kept"], 16, 16, 3)
  assert shown.std() > 20  # images, not the grey that stands for broken ones
  return manifest


def mutants(count: int, seed: int):
  random, originals = np.random.default_rng(seed), images()
  for n in range(count):
    mutation, original = divmod(n, len(originals))
    yield mutate(originals[original], mutation % MUTATIONS, random)


def images() -> list[bytes]:
  """A small image in each format that people have."""
  y, x = np.mgrid[:48, :64]
  image = Image.fromarray(np.stack([x * 4, y * 5, x * y % 256], -1).astype(np.uint8))
  other = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  formats = [
    (image, "JPEG", {"quality": 90}),
    (image, "JPEG", {"progressive": True}),
    (image.convert("CMYK"), "JPEG", {}),
    (image.convert("L"), "JPEG", {}),
    (image, "PNG", {}),
    (image.convert("RGBA"), "PNG", {}),
    (Image.fromarray((x * 900).astype(np.uint16)), "PNG", {}),
    (image, "WEBP", {}),
    (image, "WEBP", {"save_all": True, "append_images": [other]}),
    (image, "GIF", {"save_all": True, "append_images": [other]}),
    (image, "TIFF", {"compression": "tiff_lzw"}),
  ]
  out = []
  for original, kind, options in formats:
    file = io.BytesIO()
    original.save(file, kind, **options)
    out.append(file.getvalue())
  return out


def mutate(data: bytes, mutation: int, random) -> bytes:
  """Truncated, overwritten, shortened, lengthened; or with a wrong header, size or trailer."""
  data = bytearray(data)
  at, length = int(random.integers(len(data))), int(random.integers(1, 100))
  match mutation:
    case 0:
      del data[at:]
    case 1:
      _overwrite(data, 0, len(data), length // 8 + 1, random)
    case 2:
      del data[at : at + length]
    case 3:
      data[at:at] = random.bytes(length)
    case 4:
      _overwrite(data, 0, 32, 3, random)
    case 5:
      new = (2 ** random.uniform(0, 16, 2)).astype(int)
      for layout, size in ((">HH", (48, 64)), (">II", (64, 48)), ("<HH", (64, 48))):
        data = data.replace(struct.pack(layout, *size), struct.pack(layout, *new), 1)
      if data[1:4] == b"PNG":
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)  # else only the checksum is wrong
    case 6:
      _overwrite(data, len(data) - 16, len(data), 3, random)
  return bytes(data)


def _overwrite(data, start, stop, count, random):
  for place in random.integers(start, stop, count):
    data[place] = random.integers(256)


if __name__ == "__main__":
  main()
