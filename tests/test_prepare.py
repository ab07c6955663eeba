"""Tables, tar shards and Karpathy's JSON become data sets: whole, the same, and with reasons."""

import io
import json
import pathlib
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import pipeline, preparation, records

ALL_TRAIN = records.Options(shares=(("train", 1.0),))


def picture(seed, side=40, kind="JPEG"):
  """A smooth random picture, encoded."""
  colours = np.random.default_rng(seed).integers(0, 255, (5, 5, 3), np.uint8)
  out = io.BytesIO()
  image = Image.fromarray(colours).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
  image.save(out, kind, **({"quality": 92} if kind == "JPEG" else {}))
  return out.getvalue()


@pytest.fixture
def photos(tmp_path):
  folder = tmp_path / "photos"
  folder.mkdir()
  for n in range(20):
    (folder / f"{n}.jpg").write_bytes(picture(n))
  return folder


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
  return preparation.run(job, tmp_path / "out", options, **kwargs)


def source(tmp_path, name, split="train"):
  return pipeline.Source(name, str(tmp_path / "out"), split)


def contents(directory):
  return {p.name: p.read_bytes() for p in pathlib.Path(directory).iterdir() if "record" in p.name}


# ---- tables ----


def test_a_table_becomes_records_with_all_captions(tmp_path, photos):
  rows = [("1.jpg", "one"), ("0.jpg", "nought"), ("1.jpg", "ONE more"), ("0.jpg", "one")]
  manifest = run(prepare.table(write_table(tmp_path / "t.tsv", rows), photos), tmp_path)
  data = source(tmp_path, "captions/t")
  assert data.captions() == [["one", "ONE more"], ["nought", "one"]]
  assert data.picture(0) == (photos / "1.jpg").read_bytes()  # to the byte
  columns = data.columns("text_ids", "file", "caption_ids")
  assert columns["text_ids"][0][0] == columns["text_ids"][1][1] != columns["text_ids"][0][1]
  assert columns["file"] == [b"1.jpg", b"0.jpg"]
  assert columns["caption_ids"][0] == [b"1.jpg#0", b"1.jpg#1"]
  assert (manifest["kept"], manifest["rejected"]) == (4, {})
  assert (len(data), data.pairs) == (2, 4)
  assert not (tmp_path / "out" / "unfinished").exists()


def test_it_trains_from_a_prepared_table(tmp_path, photos, config):
  from xe_retrieval.data import text

  rows = [(f"{n}.jpg", f"picture {n} {k}") for n in range(20) for k in range(3)]
  run(prepare.table(write_table(tmp_path / "t.tsv", rows), photos), tmp_path)
  data = source(tmp_path, "captions/t")
  config.data.augment, config.steps = "random_resized_crop", 3
  tokenizer = text.train([c for captions in data.captions() for c in captions], 100, 8)
  batches = list(pipeline.train_batches(data, tokenizer, config))
  assert [b["image"].shape for b in batches] == [(16, 16, 16, 3)] * 3
  assert all((b["image_id"] >= 0).all() and (b["text_id"] >= 0).all() for b in batches)
  assert all(len(set(b["image_id"])) == 16 for b in batches)


def test_splits_are_by_picture_deterministic_and_as_large_as_asked(tmp_path, photos):
  for n in range(200):
    (photos / f"{n}.jpg").write_bytes(picture(n % 150))  # 50 pictures are there twice
  rows = [(f"{n}.jpg", f"{n} {k}") for n in range(200) for k in range(2)]
  options = records.Options(shares=(("train", 0.5), ("test", 0.5)))
  job = prepare.table(write_table(tmp_path / "t.tsv", rows), photos)
  manifest = run(job, tmp_path, options)
  ids = {
    s: source(tmp_path, "captions/t", s).columns("image_id")["image_id"] for s in ("train", "test")
  }
  assert not set(ids["train"]) & set(ids["test"])
  assert 0.3 < len(ids["train"]) / 200 < 0.7
  assert len(set(ids["train"])) + len(set(ids["test"])) == 150
  assert sum(part["pairs"] for part in manifest["splits"].values()) == manifest["kept"] == 400


def test_splits_given_by_the_user_are_kept(tmp_path, photos):
  rows = [("0.jpg", "a", "train"), ("1.jpg", "b", "extra"), ("0.jpg", "c", "extra")]
  table = write_table(tmp_path / "t.tsv", rows, ("image", "caption", "split"))
  manifest = run(prepare.table(table, photos), tmp_path)
  assert {s: p["pairs"] for s, p in manifest["splits"].items()} == {"train": 1, "extra": 1}
  assert manifest["rejected"] == {"contradiction": 1}  # one picture in two splits


@pytest.mark.parametrize("images", ["folder", "tar"])
def test_every_row_is_kept_or_listed_with_file_line_and_reason(tmp_path, photos, images):
  (photos / "text.jpg").write_text("this is no picture")
  (photos / "half.jpg").write_bytes(picture(1, 200)[:1500])
  (photos / "empty.jpg").write_bytes(b"")
  Image.new("1", (9000, 9000)).save(photos / "bomb.png")
  (tmp_path / "secret.jpg").write_bytes(picture(3))
  rows = [
    ("0.jpg", "kept"),
    ("nowhere.jpg", "x"),
    ("text.jpg", "x"),
    ("half.jpg", "x"),
    ("empty.jpg", "x"),
    ("bomb.png", "x"),
    ("0.jpg", "   "),
    ("0.jpg", "Kept"),
    ("../secret.jpg", "x"),
    (str(tmp_path / "secret.jpg"), "x"),
    ("0.jpg",),
    ("1.jpg", "y" * 10_001),
  ]
  table = write_table(tmp_path / "t.tsv", rows)
  where = photos
  if images == "tar":
    where = write_tar(tmp_path / "p.tar", [(p.name, p.read_bytes()) for p in photos.iterdir()])
  manifest = run(prepare.table(table, where), tmp_path)
  elsewhere = {"folder": {"missing file": 1, "outside the folder": 2}, "tar": {"missing file": 3}}
  assert manifest["rejected"] == {
    **elsewhere[images],
    **{"not an image": 2, "truncated": 1, "over the pixel limit": 1, "empty caption": 1},
    **{"too long": 1, "unreadable row": 1, "duplicate": 1},
  }
  assert manifest["kept"] + sum(manifest["rejected"].values()) == len(rows)
  lines = (tmp_path / "out/captions/t/1.0.0/rejected.tsv").read_text().splitlines()[1:]
  assert sorted(int(line.split("\t")[0].split(":")[1]) for line in lines) == list(range(3, 14))
  assert any(line.startswith("t.tsv:5\thalf.jpg\ttruncated\t") for line in lines)


def test_strict_stops_at_the_first_bad_row(tmp_path, photos):
  table = write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("nowhere.jpg", "b")])
  strict = records.Options(strict=True)
  with pytest.raises(ValueError, match=r"t\.tsv:3: missing file: nowhere\.jpg"):
    run(prepare.table(table, photos), tmp_path, strict)
  table = write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("0.jpg", "")])
  with pytest.raises(ValueError, match=r"t\.tsv:3: empty caption"):
    run(prepare.table(table, photos), tmp_path, strict)


def test_large_pictures_are_downscaled_once(tmp_path, photos):
  (photos / "large.jpg").write_bytes(picture(0, 800))
  table = write_table(tmp_path / "t.tsv", [("large.jpg", "a"), ("1.jpg", "b")])
  run(prepare.table(table, photos), tmp_path, records.Options(100, shares=(("train", 1.0),)))
  data = source(tmp_path, "captions/t")
  assert Image.open(io.BytesIO(data.picture(0))).size == (100, 75)
  small = np.asarray(Image.open(io.BytesIO(data.picture(0))), float)
  right = np.asarray(Image.open(photos / "large.jpg").resize((100, 75)), float)
  assert np.abs(small - right).mean() < 3
  assert data.picture(1) == (photos / "1.jpg").read_bytes()


def test_near_duplicates_between_splits_are_reported(tmp_path, photos):
  Image.open(io.BytesIO(picture(5, 120))).resize((100, 70)).save(photos / "like5.jpg", quality=60)
  rows = [(f"{n}.jpg", "a", "train") for n in range(10)]
  rows += [(f"{n}.jpg", "a", "test") for n in range(10, 20)] + [("like5.jpg", "b", "test")]
  table = write_table(tmp_path / "t.tsv", rows, ("image", "caption", "split"))
  manifest = run(prepare.table(table, photos), tmp_path)
  assert manifest["near duplicates of train"] == {"test": 1}
  lines = (tmp_path / "out/captions/t/1.0.0/near_duplicates.tsv").read_text().splitlines()
  assert lines[1].split("\t")[:3] == ["test", "like5.jpg", "5.jpg"]


# ---- tar shards ----


def shard(path, numbers, **more):
  members = []
  for n in numbers:
    members += [(f"{n:09d}.jpg", picture(n)), (f"{n:09d}.txt", f"caption {n}".encode())]
    members += [(f"{n:09d}.json", json.dumps({"caption": f"caption {n}", "url": "u"}).encode())]
  return write_tar(path, members)


def test_webdataset(tmp_path):
  for s in range(3):
    shard(tmp_path / f"{s:05d}.tar", range(10 * s, 10 * s + 10))
  write_tar(
    tmp_path / "validation.tar",
    [
      ("a.png", picture(90, kind="PNG")),
      ("a.json", b'{"caption": "only in json"}'),
      ("b.jpg", picture(91)),
      ("c.txt", b"no picture"),
      ("../../d.jpg", picture(92)),
      ("../../d.txt", b"outside"),
      ("e.jpg", picture(93)),
      ("e.txt", b"\xff\xfe broken"),
    ],
  )
  patterns = [f"train={tmp_path}/{{00000..00002}}.tar", f"validation={tmp_path}/validation.tar"]
  manifest = run(prepare.webdataset(patterns), tmp_path)
  assert {s: p["images"] for s, p in manifest["splits"].items()} == {"train": 30, "validation": 1}
  assert source(tmp_path, "conceptual_captions").captions()[12] == ["caption 12"]
  assert source(tmp_path, "conceptual_captions", "validation").captions() == [["only in json"]]
  assert manifest["rejected"] == {
    "missing file": 1,
    "outside the folder": 2,
    "empty caption": 1,
    "not UTF-8": 1,
  }


def test_a_torn_shard_gives_what_it_has(tmp_path):
  whole = shard(tmp_path / "0.tar", range(10)).read_bytes()
  (tmp_path / "0.tar").write_bytes(whole[: len(whole) // 2])
  (tmp_path / "1.tar").write_bytes(b"not a tar at all" * 100)
  manifest = run(prepare.webdataset([f"{tmp_path}/?.tar"], "torn"), tmp_path)
  assert 3 <= manifest["kept"] <= 6
  assert manifest["rejected"]["truncated"] >= 2


def test_without_max_side_files_are_copied(tmp_path):
  shard(tmp_path / "0.tar", range(4))
  options = records.Options(None, shares=(("train", 1.0),))
  run(prepare.webdataset([f"{tmp_path}/0.tar"]), tmp_path, options)
  data = source(tmp_path, "conceptual_captions")
  assert [data.picture(n) for n in range(4)] == [picture(n) for n in range(4)]


def test_what_another_shard_has_is_left_out(tmp_path):
  shard(tmp_path / "0.tar", range(5))
  shard(tmp_path / "1.tar", [7, 3, 8, 1])
  shard(tmp_path / "2.tar", [3, 1])
  manifest = run(prepare.webdataset([f"{tmp_path}/?.tar"], "twice"), tmp_path)
  assert (manifest["kept"], manifest["rejected"]) == (7, {"duplicate": 4})
  data = source(tmp_path, "captions/twice")
  expected = [f"caption {n}" for n in (0, 1, 2, 3, 4, 7, 8)]
  assert [c for record in data.captions() for c in record] == expected
  assert data.picture(5) == picture(7)
  lines = (tmp_path / "out/captions/twice/1.0.0/rejected.tsv").read_text().splitlines()[1:]
  assert [line.split("\t")[0] for line in lines] == [
    f"{s}.tar:{n:09d}.jpg" for s, n in ((1, 3), (1, 1), (2, 3), (2, 1))
  ]
  with pytest.raises(ValueError, match=r"1\.tar:000000003\.jpg: duplicate"):
    run(prepare.webdataset([f"{tmp_path}/?.tar"], "strict"), tmp_path, records.Options(strict=True))


def test_copies_between_splits_are_reported_though_nothing_was_decoded(tmp_path):
  shard(tmp_path / "0.tar", range(5))
  shard(tmp_path / "1.tar", [7, 3])
  patterns = [f"train={tmp_path}/0.tar", f"test={tmp_path}/1.tar"]
  manifest = run(prepare.webdataset(patterns, "leak"), tmp_path, records.Options(None))
  assert manifest["kept"] == 7  # the splits are the user's
  assert manifest["near duplicates of train"] == {"test": 1}
  lines = (tmp_path / "out/captions/leak/1.0.0/near_duplicates.tsv").read_text().splitlines()
  assert lines[1:] == ["test\t000000003.jpg\t000000003.jpg\t0"]


def test_a_name_that_is_no_text(tmp_path):
  names = ["a\udcff.jpg", "a\udcff.txt"]  # the byte 0xff
  write_tar(tmp_path / "0.tar", zip(names, [picture(0), b"a caption"], strict=True))
  run(prepare.webdataset([f"{tmp_path}/0.tar"], "names"), tmp_path)
  data = source(tmp_path, "captions/names")
  assert data.columns("file")["file"] == [b"a\\udcff.jpg"]


# ---- Karpathy ----


def test_flickr30k(tmp_path, photos):
  entries = [
    {
      "filename": f"{n}.jpg",
      "split": ("train", "val", "test")[min(n // 8, 2)],
      "sentences": [{"raw": f"caption {k % 4}"} for k in range(5)],
    }
    for n in range(20)
  ]
  path = tmp_path / "dataset_flickr30k.json"
  path.write_text(json.dumps({"dataset": "flickr30k", "images": entries}))
  manifest = run(prepare.flickr30k(path, photos), tmp_path)
  assert {s: (p["images"], p["pairs"]) for s, p in manifest["splits"].items()} == {
    "train": (8, 40),
    "validation": (8, 40),
    "test": (4, 20),  # all five captions, though two are equal
  }
  assert len(source(tmp_path, "flickr30k", "test")) == 4
  path.write_text('{"images": [{"filename": 1}]}')
  with pytest.raises(ValueError, match=r"dataset_flickr30k\.json: should be"):
    prepare.flickr30k(path, photos)


# ---- whole or not at all ----


def table_of(tmp_path, photos, pictures=600):
  for n in range(20, pictures):
    (photos / f"{n}.jpg").write_bytes(picture(n, 16))
  rows = [(f"{n}.jpg", f"caption {n}") for n in range(pictures)]
  return write_table(tmp_path / "t.tsv", rows)


def test_interrupted_and_continued_is_the_same_data_set(tmp_path, photos):
  job = prepare.table(table_of(tmp_path, photos), photos)
  assert len(job.units) == 3
  preparation.run(job, tmp_path / "whole", records.Options())

  class Interrupting:
    def read(self):
      yield from job.units[1].read()
      raise KeyboardInterrupt

  units = [job.units[0], Interrupting(), job.units[2]]
  with pytest.raises(KeyboardInterrupt):
    run(job._replace(units=units), tmp_path, records.Options())
  unfinished = tmp_path / "out/unfinished/captions_t"
  assert sorted(p.name for p in unfinished.glob("0*.json")) == ["00000.json"]
  assert not (tmp_path / "out/captions").exists()
  first = {p.stat().st_ino for p in unfinished.glob("00000*.array_record")}
  run(job, tmp_path, records.Options())
  end = "captions/t/1.0.0"
  assert contents(tmp_path / "whole" / end) == contents(tmp_path / "out" / end)
  assert first <= {p.stat().st_ino for p in (tmp_path / "out" / end).iterdir()}  # not made anew


def test_two_processes_write_the_same_data_set_as_one(tmp_path, photos):
  job = prepare.table(table_of(tmp_path, photos), photos)
  for processes in (1, 2):
    preparation.run(job, tmp_path / str(processes), records.Options(), processes)
  one, two = (contents(tmp_path / p / "captions/t/1.0.0") for p in "12")
  assert one == two and len(one) == 9


def test_other_options_never_mix_with_what_is_there(tmp_path, photos):
  job = prepare.table(write_table(tmp_path / "t.tsv", [("0.jpg", "a")]), photos)
  first = run(job, tmp_path)
  assert run(job, tmp_path) == first
  with pytest.raises(ValueError, match="prepared from other files or with other options"):
    run(job, tmp_path, records.Options(max_side=8))


def test_sentences_for_wrong_arguments(tmp_path, photos):
  with pytest.raises(ValueError, match=r"no column 'caption', but image, text"):
    prepare.table(write_table(tmp_path / "t.tsv", [], ("image", "text")), photos)
  good = write_table(tmp_path / "t.tsv", [("x.jpg", "a")])
  with pytest.raises(ValueError, match="there is no such folder or tar"):
    prepare.table(good, tmp_path / "nothing")
  with pytest.raises(ValueError, match=r"nothing is left of captions/t: 1 missing file; first: t"):
    run(prepare.table(good, photos), tmp_path)
  with pytest.raises(ValueError, match=r"00007\.tar: there is no such file"):
    prepare.webdataset([f"{tmp_path}/{{00007..00009}}.tar"])
  for wrong in ("train=0.5", "train", "train=1,", "train=x"):
    with pytest.raises(ValueError, match="--shares="):
      prepare.shares(wrong)


def test_the_binary(tmp_path, photos):
  table = write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("nowhere.jpg", "b")])
  command = [sys.executable, "-m", "xe_retrieval.prepare", f"--captions={table}"]
  done = subprocess.run(
    [*command, f"--images={photos}", f"--out={tmp_path / 'out'}", "--shares=train=1"],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "captions/t: 1 pairs" in done.stdout and "left out, missing file: 1" in done.stdout
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert done.stderr.strip() == "error: --captions needs --images, the folder of the pictures"
