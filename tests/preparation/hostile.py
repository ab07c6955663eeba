"""159 rows, good and hostile: every kind of bad input that the tests of this folder know."""

import io
import os

from PIL import Image

from benchmarks import fuzz_images
from tests.preparation.conftest import encoded
from tests.preparation.test_image_files import KINDS

ROWS = 159


def write(directory):
  """A table, t.tsv, and the folder photos under `directory`; returns their paths."""
  photos, table = directory / "photos", directory / "t.tsv"
  photos.mkdir(parents=True)
  lines = [*_formats(photos), *_files(photos, directory), *_lines(), *_duplicates(photos)]
  for n in range(ROWS - len(lines)):
    (photos / f"good {n}.jpg").write_bytes(encoded(n))
    lines.append(_line(f"good {n}.jpg", f"ünïcode \N{SNOWMAN} {n}", ("train", "test")[n % 5 == 0]))
  # Kinds next to each other would all fall into one part.
  lines = [line for start in range(7) for line in lines[start::7]]
  table.write_bytes(b"\n".join([b"image\tcaption\tsplit", *lines]) + b"\n")
  return table, photos


def _line(image, caption, split="train"):
  return f"{image}\t{caption}\t{split}".encode("utf-8", "surrogateescape")


def _formats(photos):
  """Each format, and mutants of each in every way."""
  mutants = fuzz_images.mutants(77, seed=0)
  images = {**KINDS, **{f"mutant {n}": data for n, data in enumerate(mutants)}}
  for name, data in images.items():
    (photos / f"{name}.jpg").write_bytes(data)
    yield _line(f"{name}.jpg", f"of kind {name}")


def _files(photos, directory):
  """Files that are none, and names that lead out of the folder."""
  secret = directory / "secret.jpg"
  secret.write_bytes(encoded(1000))
  (photos / "own.jpg").write_bytes(encoded(1001))
  (photos / "link.jpg").symlink_to(secret)
  (photos / "inner.jpg").symlink_to(photos / "own.jpg")
  os.mkfifo(photos / "pipe.jpg")
  (photos / "text.jpg").write_text("this is not an image")
  (photos / "half.jpg").write_bytes(encoded(1002, 200)[:1500])
  (photos / "empty.jpg").write_bytes(b"")
  Image.new("1", (9000, 9000)).save(photos / "bomb.png")
  names = ["../secret.jpg", str(secret), "link.jpg", "pipe.jpg", ".", "a\0b.jpg", "own.jpg"]
  names += ["inner.jpg", "../../../../../../etc/passwd", "own.jpg/../../secret.jpg", "~/x.jpg"]
  names += [
    "/dev/zero",
    "text.jpg",
    "half.jpg",
    "empty.jpg",
    "bomb.png",
    "https://x.org/nowhere.jpg",
  ]
  return [_line(name, "x") for name in names]


def _lines():
  """Lines that are no rows."""
  return [
    b"own.jpg\t\xff\xfe\xfd\ttrain",
    b"\xff.jpg\tcaption\ttrain",
    b"own.jpg\t" + b"x" * 1_000_000 + b"\ttrain",
    _line("own.jpg", "y" * 10_001),
    _line("own.jpg", " \0 "),
    b"own.jpg",
    b"own.jpg\tb\tc\td",
    _line("", "caption"),
    _line("x" * 5_000, "caption"),
    _line("own.jpg", "caption", "all"),
    _line("own.jpg", "caption", "a/b"),
    _line("own.jpg", "caption", ""),
    _line("own.jpg", "X"),  # but for the case, a caption that it has
    _line("own.jpg", "in another split", "test"),
  ]


def _duplicates(photos):
  """Copies and near copies of images, in the same split and in another."""
  for n in range(8):
    (photos / f"copy {n}.jpg").write_bytes(encoded(n))
    split = "train" if n < 3 else "validation"
    yield _line(f"copy {n}.jpg", f"ünïcode \N{SNOWMAN} {n}" if n < 5 else "of its own", split)
  for n in range(8, 12):
    small = Image.open(io.BytesIO(encoded(n, 120))).resize((100, 70))
    small.save(photos / f"near {n}.jpg", quality=60)
    yield _line(f"near {n}.jpg", "smaller", "validation")
