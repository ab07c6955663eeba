"""Broken images, tables and tars: each is kept or rejected with a reason, and none does harm."""

import errno
import json
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from benchmarks import fuzz_images
from tests.preparation.conftest import encoded, run, source, write_table, write_tar
from xe_retrieval import prepare
from xe_retrieval.preparation import archives, caption_tables
from xe_retrieval.preparation.rejections import REASONS, Rejection


@pytest.mark.parametrize("max_side", fuzz_images.MAX_SIDES)
def test_mutated_images(tmp_path, max_side):
  fuzz_images.check(tmp_path, 462, max_side)  # 11 formats x 7 mutations x 6


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
    found = list(caption_tables.rows(path))
    assert len(found) >= 20
    samples, rejections = caption_tables.group(found)
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
def test_a_bad_line_rejects_only_itself(tmp_path, line, reason):
  path = tmp_path / "t.tsv"
  path.write_bytes(b"image\tcaption\na.jpg\tone\n" + line + b"\nb.jpg\ttwo\n")
  first, bad, last = caption_tables.rows(path)
  assert (first.caption, last.caption) == ("one", "two")
  assert isinstance(bad, Rejection) and (bad.where, bad.reason) == ("t.tsv:3", reason)


def test_an_unclosed_quote_is_found_and_bounded(tmp_path):
  path = tmp_path / "t.csv"
  path.write_text('image,caption\na.jpg,"open\n' + "b.jpg,fine\n" * 5_000)
  found = list(caption_tables.rows(path))
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
  manifest = run(prepare.table(str(tmp_path / "t.jsonl"), str(photos)), tmp_path)
  files = source(tmp_path, "captions/t").column("file")
  assert list(files) == [b"own.png"]  # inner.png is the same image
  assert manifest["rejected"] == {"missing file": 4, "outside the folder": 6, "duplicate": 1}


def test_a_disk_that_fails_for_a_while_is_no_missing_file(tmp_path, monkeypatch, photos):
  job = prepare.table(str(write_table(tmp_path / "t.tsv", [("0.jpg", "a caption")])), str(photos))

  def fails(path, mode):
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)

  with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output.*photos/0.jpg"):
    patch.setattr(archives, "open", fails, raising=False)
    run(job, tmp_path)
  assert not (tmp_path / "out/captions").exists()
  assert run(job, tmp_path)["kept"] == 1


def test_hostile_tar_members(tmp_path):
  names = ("/etc/a.jpg", "x/../../b.jpg", "good.jpg", "good.txt", "text.txt")
  image, caption = encoded(0), b"a caption"
  path = write_tar(tmp_path / "0.tar", [(n, image if "jpg" in n else caption) for n in names])
  with tarfile.open(path, "a") as tar:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
      member = tarfile.TarInfo("link.jpg")
      member.type, member.linkname = kind, "/etc/passwd"
      tar.addfile(member)
  manifest = run(prepare.webdataset([str(path)], "hostile"), tmp_path)
  assert manifest["kept"] == 1
  assert manifest["rejected"] == {"missing file": 5, "outside the folder": 2}
