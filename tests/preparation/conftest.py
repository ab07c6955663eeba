"""Images, tables and shards to prepare, and what became of them."""

import io
import pathlib
import tarfile

import numpy as np
import pytest
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import pipeline
from xe_retrieval.preparation import records

ALL_TRAIN = records.Options(shares=(("train", 1.0),))


@pytest.fixture
def photos(tmp_path):
  """A folder of 20 images."""
  folder = tmp_path / "photos"
  folder.mkdir()
  for n in range(20):
    (folder / f"{n}.jpg").write_bytes(encoded(n))
  return folder


def encoded(seed, side=40, kind="JPEG"):
  """A smooth random image, encoded."""
  colours = np.random.default_rng(seed).integers(0, 255, (5, 5, 3), np.uint8)
  out = io.BytesIO()
  image = Image.fromarray(colours).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
  image.save(out, kind, **({"quality": 92} if kind == "JPEG" else {}))
  return out.getvalue()


def write_table(path, rows, columns=("image", "caption")):
  lines = ["\t".join(map(str, row)) for row in (columns, *rows)]
  path.write_text("\n".join(lines) + "\n")
  return path


def write_tar(path, members):
  with tarfile.open(path, "w") as tar:
    for name, content in members:
      entry = tarfile.TarInfo(name)
      entry.size = len(content)
      tar.addfile(entry, io.BytesIO(content))
  return path


def run(job, tmp_path, options=ALL_TRAIN, **kwargs):
  return prepare.prepare(job, tmp_path / "out", options, **kwargs)


def source(tmp_path, name, split="train"):
  return pipeline.Source(name, str(tmp_path / "out"), split)


def contents(directory):
  return {p.name: p.read_bytes() for p in pathlib.Path(directory).iterdir() if "record" in p.name}
