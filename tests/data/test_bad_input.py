"""Thousands of broken files, tables and tars: all of them kept or explained, and none does harm."""

import io
import json
import os
import resource
import tarfile

import numpy as np
import pytest
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import pipeline, preparation, records, tables
from xe_retrieval.data.rejected import REASONS, Rejection

ALL_TRAIN = (("train", 1.0),)


def seeds():
  """Small pictures of every kind that people have."""
  y, x = np.mgrid[:48, :64]
  image = Image.fromarray(np.stack([x * 4, y * 5, x * y % 256], -1).astype(np.uint8))
  other = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  kinds = [
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
  for picture, kind, options in kinds:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    out.append(file.getvalue())
  return out


def mutated(data, random):
  """Cut, overwritten, shortened in the middle, lengthened, or with wrong sizes in its head."""
  data = bytearray(data)
  at, length = int(random.integers(len(data))), int(random.integers(1, 100))
  match random.integers(6):
    case 0:
      del data[at:]
    case 1:
      for place in random.integers(len(data), size=length // 8 + 1):
        data[place] = random.integers(256)
    case 2:
      del data[at : at + length]
    case 3:
      data[at:at] = random.bytes(length)
    case 4:
      for place in random.integers(min(64, len(data)), size=3):
        data[place] = random.integers(256)
    case 5:
      data[16:24] = random.bytes(8)  # width and height of a PNG
  return bytes(data)


def fuzz(tmp_path, count, max_side):
  """Mutated pictures through a tar, `prepare` and the pipeline."""
  random, pictures = np.random.default_rng(0), seeds()
  path = tmp_path / "shard.tar"
  with tarfile.open(path, "w") as tar:
    for n in range(count):
      broken = mutated(pictures[n % len(pictures)], random)
      for name, content in ((f"{n:06d}.jpg", broken), (f"{n:06d}.txt", b"caption %d" % n)):
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
  options = records.Options(max_side, max_pixels=1_000_000, shares=ALL_TRAIN)
  manifest = preparation.run(prepare.webdataset([str(path)], "fuzz"), tmp_path / "out", options)
  assert manifest["kept"] + sum(manifest["rejected"].values()) == count
  assert manifest["kept"] > count // 10 and manifest["rejected"]["not an image"] > count // 10
  source = pipeline.Source("captions/fuzz", str(tmp_path / "out"), "train")
  shown = np.concatenate(list(pipeline.image_batches(source, 16, batch_size=256)))
  assert shown.shape == (manifest["kept"], 16, 16, 3)
  assert shown.std() > 20


@pytest.mark.parametrize("max_side", [32, 384, None])
def test_mutated_pictures(tmp_path, max_side):
  fuzz(tmp_path, 900, max_side)


@pytest.mark.slow
@pytest.mark.parametrize("max_side", [32, 384, None])
def test_ten_thousand_mutated_pictures(tmp_path, max_side):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  fuzz(tmp_path, 10_000, max_side)
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown < 500_000  # kB


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_mutated_tables(tmp_path, kind):
  random = np.random.default_rng(0)
  rows = [{"image": f"{n}.jpg", "caption": f'caption "{n}", of\tsome sort'} for n in range(40)]
  if kind == "jsonl":
    whole = "\n".join(map(json.dumps, rows)).encode()
  else:
    comma = {"csv": ",", "tsv": "\t"}[kind]
    whole = f"image{comma}caption\n".encode()
    whole += "\n".join(f'{r["image"]}{comma}a caption, "quoted"' for r in rows).encode()
  path = tmp_path / f"t.{kind}"
  nasty = [b"\0", b'"', b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n", b"\t,", b"'{", b"\xe2\x80\xa8"]
  for _ in range(300):
    data = bytearray(whole)
    for place in random.integers(20, len(data), size=4):
      data[place:place] = nasty[random.integers(len(nasty))]
    path.write_bytes(bytes(data))
    found = list(tables.rows(path))
    assert len(found) >= 20
    samples, rejections = tables.group(found)
    assert sum(len(s.captions) for s in samples) + len(rejections) == len(found)
    for rejection in rejections:
      assert rejection.reason in REASONS and rejection.where.startswith(f"t.{kind}:")
    for sample in samples:
      for caption in sample.captions:
        assert caption.text.encode() and "\0" not in caption.text


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    (b"a.jpg\t\xff\xfe\xfd", "not UTF-8"),
    (b"\xff.jpg\tcaption", "not UTF-8"),
    (b"a.jpg\t" + b"x" * 1_000_000, "too long"),
    (b"a.jpg\t" + b"x" * 30_000_000, "too long"),
    (b"a.jpg\t \0 ", "empty caption"),
    (b"a.jpg", "unreadable row"),
    (b"a.jpg\tb\tc", "unreadable row"),
    (b"\tcaption", "missing file"),
    (b"x" * 5_000 + b"\tcaption", "too long"),
  ],
)
def test_a_bad_line_costs_only_itself(tmp_path, line, reason):
  path = tmp_path / "t.tsv"
  path.write_bytes(b"image\tcaption\na.jpg\tone\n" + line + b"\nb.jpg\ttwo\n")
  first, bad, last = tables.rows(path)
  assert (first.caption, last.caption) == ("one", "two")
  assert isinstance(bad, Rejection) and (bad.where, bad.reason) == ("t.tsv:3", reason)


def test_a_quote_that_is_never_closed_is_found_and_bounded(tmp_path):
  path = tmp_path / "t.csv"
  path.write_text('image,caption\na.jpg,"open\n' + "b.jpg,fine\n" * 5_000)
  found = list(tables.rows(path))
  bad = [row for row in found if isinstance(row, Rejection)]
  assert bad[0].where.startswith("t.csv:2-") and "quote" in bad[0].detail
  assert len(found) > 3_000


def test_nothing_outside_the_folder_is_read(tmp_path):
  photos, secret = tmp_path / "photos", tmp_path / "secret.png"
  photos.mkdir()
  Image.new("RGB", (8, 8)).save(secret)
  Image.new("RGB", (8, 8)).save(photos / "own.png")
  (photos / "link.png").symlink_to(secret)
  (photos / "inner.png").symlink_to(photos / "own.png")
  os.mkfifo(photos / "pipe.png")
  names = [
    "../secret.png",
    str(secret),
    "link.png",
    "pipe.png",
    ".",
    "a\0b.png",
    "own.png",
    "inner.png",
  ]
  names += ["../../../../../../etc/passwd", "own.png/../../secret.png", "~/x.png", "/dev/zero"]
  lines = [json.dumps({"image": name, "caption": "x"}) for name in names]
  (tmp_path / "t.jsonl").write_text("\n".join(lines))
  job = prepare.table(str(tmp_path / "t.jsonl"), str(photos))
  manifest = preparation.run(job, tmp_path / "out", records.Options(shares=ALL_TRAIN))
  source = pipeline.Source("captions/t", str(tmp_path / "out"), "train")
  assert source.columns("file")["file"] == [b"own.png"]  # inner.png is the same picture
  assert manifest["rejected"] == {"missing file": 4, "outside the folder": 6, "duplicate": 1}


def test_hostile_tar_members(tmp_path):
  path = tmp_path / "0.tar"
  picture = seeds()[0]
  with tarfile.open(path, "w") as tar:
    for name in ("/etc/a.jpg", "x/../../b.jpg", "good.jpg", "good.txt", "text.txt"):
      content = picture if name.endswith("jpg") else b"a caption"
      member = tarfile.TarInfo(name)
      member.size = len(content)
      tar.addfile(member, io.BytesIO(content))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
      member = tarfile.TarInfo("link.jpg")
      member.type, member.linkname = kind, "/etc/passwd"
      tar.addfile(member)
  job = prepare.webdataset([str(path)], "hostile")
  manifest = preparation.run(job, tmp_path / "out", records.Options(shares=ALL_TRAIN))
  assert manifest["kept"] == 1
  assert manifest["rejected"] == {"missing file": 5, "outside the folder": 2}
