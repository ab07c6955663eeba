"""Tables and Karpathy's JSON become data sets, and every row that does not has a reason."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.preparation.conftest import encoded, run, source, write_table, write_tar
from xe_retrieval import prepare
from xe_retrieval.data import pipeline
from xe_retrieval.preparation import records


def test_a_table_becomes_records_with_all_captions(tmp_path, photos):
  rows = [("1.jpg", "one"), ("0.jpg", "nought"), ("1.jpg", "ONE more"), ("0.jpg", "one")]
  manifest = run(prepare.table(write_table(tmp_path / "t.tsv", rows), photos), tmp_path)
  data = source(tmp_path, "captions/t")
  assert list(data.captions()) == [["one", "ONE more"], ["nought", "one"]]
  assert data.image(0) == (photos / "1.jpg").read_bytes()  # byte for byte
  text_ids = data.column("text_ids")
  assert text_ids[0][0] == text_ids[1][1] != text_ids[0][1]
  assert list(data.column("file")) == [b"1.jpg", b"0.jpg"]
  assert data.column("caption_ids")[0] == [b"1.jpg#0", b"1.jpg#1"]
  assert (manifest["kept"], manifest["rejected"]) == (4, {})
  assert (len(data), data.pairs) == (2, 4)
  assert not (tmp_path / "out" / "unfinished").exists()


def test_training_batches_of_a_prepared_table(tmp_path, photos, config):
  from xe_retrieval.data import tokenization

  rows = [(f"{n}.jpg", f"image {n} {k}") for n in range(20) for k in range(3)]
  run(prepare.table(write_table(tmp_path / "t.tsv", rows), photos), tmp_path)
  data = source(tmp_path, "captions/t")
  config.data.augment, config.steps = "random_resized_crop", 3
  tokenizer = tokenization.train([c for captions in data.captions() for c in captions], 100, 8)
  batches = list(pipeline.train_batches(data, tokenizer, config))
  assert [b["image"].shape for b in batches] == [(16, 16, 16, 3)] * 3
  assert all((b["image_id"] >= 0).all() and (b["text_id"] >= 0).all() for b in batches)
  assert all(len(set(b["image_id"])) == 16 for b in batches)


def test_splits_are_by_image_and_as_large_as_requested(tmp_path, photos):
  for n in range(200):
    (photos / f"{n}.jpg").write_bytes(encoded(n % 150))  # 50 images occur twice
  rows = [(f"{n}.jpg", f"{n} {k}") for n in range(200) for k in range(2)]
  options = records.Options(shares=(("train", 0.5), ("test", 0.5)))
  job = prepare.table(write_table(tmp_path / "t.tsv", rows), photos)
  manifest = run(job, tmp_path, options)
  ids = {s: source(tmp_path, "captions/t", s).column("image_id") for s in ("train", "test")}
  assert not set(ids["train"]) & set(ids["test"])
  assert 0.3 < len(ids["train"]) / 200 < 0.7
  assert len(set(ids["train"])) + len(set(ids["test"])) == 150
  assert sum(part["pairs"] for part in manifest["splits"].values()) == manifest["kept"] == 400


def test_splits_given_by_the_user_are_kept(tmp_path, photos):
  rows = [("0.jpg", "a", "train"), ("1.jpg", "b", "extra"), ("0.jpg", "c", "extra")]
  table = write_table(tmp_path / "t.tsv", rows, ("image", "caption", "split"))
  manifest = run(prepare.table(table, photos), tmp_path)
  assert {s: p["pairs"] for s, p in manifest["splits"].items()} == {"train": 1, "extra": 1}
  assert manifest["rejected"] == {"contradiction": 1}  # one image in two splits


@pytest.mark.parametrize("images", ["folder", "tar"])
def test_every_row_is_kept_or_listed_with_file_line_and_reason(tmp_path, photos, images):
  (photos / "text.jpg").write_text("this is not an image")
  (photos / "half.jpg").write_bytes(encoded(1, 200)[:1500])
  (photos / "empty.jpg").write_bytes(b"")
  Image.new("1", (9000, 9000)).save(photos / "bomb.png")
  (tmp_path / "secret.jpg").write_bytes(encoded(3))
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


def test_large_images_are_scaled_down(tmp_path, photos):
  (photos / "large.jpg").write_bytes(encoded(0, 800))
  table = write_table(tmp_path / "t.tsv", [("large.jpg", "a"), ("1.jpg", "b")])
  run(prepare.table(table, photos), tmp_path, records.Options(100, shares=(("train", 1.0),)))
  data = source(tmp_path, "captions/t")
  assert Image.open(io.BytesIO(data.image(0))).size == (100, 75)
  small = np.asarray(Image.open(io.BytesIO(data.image(0))), float)
  right = np.asarray(Image.open(photos / "large.jpg").resize((100, 75)), float)
  assert np.abs(small - right).mean() < 3
  assert data.image(1) == (photos / "1.jpg").read_bytes()


def test_near_duplicates_between_splits_are_reported(tmp_path, photos):
  Image.open(io.BytesIO(encoded(5, 120))).resize((100, 70)).save(photos / "like5.jpg", quality=60)
  rows = [(f"{n}.jpg", "a", "train") for n in range(10)]
  rows += [(f"{n}.jpg", "a", "test") for n in range(10, 20)] + [("like5.jpg", "b", "test")]
  table = write_table(tmp_path / "t.tsv", rows, ("image", "caption", "split"))
  manifest = run(prepare.table(table, photos), tmp_path)
  assert manifest["near duplicates of train"] == {"test": 1}
  lines = (tmp_path / "out/captions/t/1.0.0/near_duplicates.tsv").read_text().splitlines()
  assert lines[1].split("\t")[:3] == ["test", "like5.jpg", "5.jpg"]


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


def write_coco(path, images, captions):
  """`images` are their numbers, `captions` [(annotation, image, text)]."""
  document = {
    "info": {"year": 2017},
    "images": [{"id": n, "file_name": f"{n}.jpg", "height": 30} for n in images],
    "annotations": [{"id": a, "image_id": n, "caption": text} for a, n, text in captions],
  }
  path.write_text(json.dumps(document))
  return path


@pytest.mark.parametrize("folders", [False, True])
def test_coco(tmp_path, photos, folders):
  captions = [(100 + 5 * n + k, n, f"caption {n} {min(k, 3)}") for n in range(8) for k in range(5)]
  train = write_coco(tmp_path / "captions_train2017.json", range(8), captions)
  val = write_coco(
    tmp_path / "captions_val2017.json", range(8, 11), [(7, 9, " a\n b"), (8, 10, "")]
  )
  if folders:  # as unpacked
    for folder, numbers in (("train2017", range(8)), ("val2017", range(8, 11))):
      (photos / folder).mkdir()
      for n in numbers:
        (photos / f"{n}.jpg").rename(photos / folder / f"{n}.jpg")
  job = prepare.coco([f"train={train}", f"validation={val}"], photos)
  manifest = run(job, tmp_path)
  assert {s: (p["images"], p["pairs"]) for s, p in manifest["splits"].items()} == {
    "train": (8, 40),  # all five captions, though two are equal
    "validation": (1, 1),
  }
  assert manifest["rejected"] == {"empty caption": 1}
  data = source(tmp_path, "captions/coco")
  assert data.column("file")[2] == b"2.jpg"  # the name that judgements use, wherever the file lies
  assert data.column("caption_ids")[2] == [b"110", b"111", b"112", b"113", b"114"]
  assert list(source(tmp_path, "captions/coco", "validation").captions()) == [["a b"]]
  rejected = (tmp_path / "out/captions/coco/1.0.0/rejected.tsv").read_text()
  assert "captions_val2017.json:annotation 8\t10.jpg\tempty caption" in rejected


def test_coco_without_splits_is_divided_by_shares(tmp_path, photos):
  path = write_coco(tmp_path / "c.json", range(20), [(n, n, f"caption {n}") for n in range(20)])
  options = records.Options(shares=(("train", 0.5), ("test", 0.5)))
  manifest = run(prepare.coco([str(path)], photos, "mine"), tmp_path, options)
  assert manifest["splits"].keys() == {"train", "test"} and manifest["kept"] == 20
  assert manifest["plan"]["name"] == "captions/mine"


def test_other_files_than_cocos_captions_are_told_apart(tmp_path, photos):
  path = write_coco(tmp_path / "c.json", [1], [(5, 1, "a"), (6, 2, "b")])
  manifest = run(prepare.coco([str(path)], photos), tmp_path)
  assert manifest["rejected"] == {"missing file": 1}
  rejected = (tmp_path / "out/captions/coco/1.0.0/rejected.tsv").read_text()
  assert "c.json:annotation 6\t\tmissing file\timage_id 2 is not among the images" in rejected
  boxes = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"id": 5, "image_id": 1}]}
  for document, sentence in [
    (boxes, r"like captions_train2017\.json, but it or one of its entries has no 'caption'"),
    ({"images": [{"id": []}]}, r"has no 'file_name'"),
    ({"annotations": []}, r"c\.json: should be .* has no 'images'"),
    ([1], r"c\.json: should be"),
  ]:
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=sentence):
      prepare.coco([str(path)], photos)
  path.write_text("image\tcaption")
  with pytest.raises(ValueError, match=r"c\.json: should be a JSON file"):
    prepare.coco([str(path)], photos)
  for argument, sentence in [
    ("train=nowhere.json", r"nowhere\.json: there is no such file"),
    (f"all={path}", r"--coco=all=.*c\.json: split 'all' should be like train or test, not all"),
  ]:
    with pytest.raises(ValueError, match=sentence):
      prepare.coco([argument], photos)
