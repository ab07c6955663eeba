"""A folder of pictures is read like a split without captions."""

import os

import numpy as np
import pytest
from absl import logging
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import image_folder, pipeline, shapes
from xe_retrieval.preparation import records


@pytest.fixture
def photos(tmp_path):
  """Seven pictures in two folders, one of them broken, among files that are no pictures."""
  folder = tmp_path / "photos"
  (folder / "deeper").mkdir(parents=True)
  (folder / ".hidden").mkdir()
  for i, name in enumerate(["b.png", "a.jpg", "deeper/c.webp", "deeper/d.gif", "e.bmp"]):
    Image.fromarray(shapes.render(shapes.scene(0, "train", i))).save(folder / name)
  Image.new("RGB", (9, 9)).save(folder / ".hidden" / "x.png")
  Image.new("RGB", (9, 9)).save(folder / ".y.png")
  (folder / "broken.jpg").write_bytes((folder / "a.jpg").read_bytes()[:300])
  (folder / "dangling.png").symlink_to(tmp_path / "nowhere.png")
  (folder / "notes.txt").write_text("not a picture")
  return folder


NAMES = ["a.jpg", "b.png", "broken.jpg", "dangling.png", "deeper/c.webp", "deeper/d.gif", "e.bmp"]


def test_every_picture_in_order_and_broken_ones_grey(photos, caplog, monkeypatch):
  monkeypatch.setattr(logging.get_absl_logger(), "propagate", True)  # to caplog
  source = image_folder.open_images(str(photos))
  assert [entry.name for entry in image_folder.walk(photos)] == NAMES
  assert (len(source), source.split, source.captions()) == (7, "images", None)
  found = np.concatenate(list(pipeline.image_batches(source, 64, pipeline.spans(7, 4))))
  assert found.shape == (7, 64, 64, 3)
  grey = [bool((image == 127).all()) for image in found]
  assert grey == [name.startswith(("broken", "dangling")) for name in NAMES]
  assert f"{photos}: 2 broken images are shown grey" in caplog.text
  for name, number in (("b.png", 0), ("a.jpg", 1), ("deeper/c.webp", 2), ("deeper/d.gif", 3)):
    scene = shapes.render(shapes.scene(0, "train", number)).astype(float)
    assert np.abs(found[NAMES.index(name)] - scene).mean() < 6  # JPEG of few pixels
  np.testing.assert_array_equal(
    np.concatenate(list(pipeline.image_batches(source, 64, [slice(4, 7)]))), found[4:]
  )


def test_a_broken_picture_is_counted_once(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(logging.get_absl_logger(), "propagate", True)  # to caplog
  (tmp_path / "a.png").write_bytes(b"broken")
  source = image_folder.ImageFolder(tmp_path)
  assert [len(batch) for batch in pipeline.image_batches(source, 8, [slice(0, 1)])] == [1]
  assert ": 1 broken images are shown grey" in caplog.text


def test_a_picture_looks_as_in_a_prepared_data_set(photos, tmp_path):
  good = [name for name in NAMES if not name.startswith(("broken", "dangling"))]
  rows = ["image\tcaption", *(f"{name}\tcaption" for name in good)]
  (tmp_path / "t.tsv").write_text("\n".join(rows))
  options = records.Options(shares=(("train", 1.0),))
  prepare.prepare(prepare.table(tmp_path / "t.tsv", photos), tmp_path / "out", options)
  prepared = image_folder.open_images("captions/t:train", str(tmp_path / "out"))
  folder = image_folder.ImageFolder(photos)
  for i, name in enumerate(good):
    assert prepared.image(i) == folder.image(NAMES.index(name)), name


def test_the_fingerprint_tells_files_apart_by_name_size_and_time(photos, tmp_path):
  def fingerprint(folder=photos):
    return image_folder.ImageFolder(folder).fingerprint()

  before = fingerprint()
  assert fingerprint() == before
  (photos / "notes.txt").write_text("still not a picture")
  os.rename(photos, tmp_path / "moved")
  assert fingerprint(tmp_path / "moved") == before
  os.utime(tmp_path / "moved" / "a.jpg", ns=(0, 10**18))
  touched = fingerprint(tmp_path / "moved")
  (tmp_path / "moved" / "b.png").rename(tmp_path / "moved" / "f.png")
  assert len({before, touched, fingerprint(tmp_path / "moved")}) == 3


def test_what_cannot_be_opened_is_told_in_a_sentence(tmp_path):
  with pytest.raises(ValueError, match=r"nothing is neither a folder of pictures nor a data set"):
    image_folder.open_images("nothing")
  with pytest.raises(ValueError, match=r"holds no pictures \(files that end in \.jpg"):
    image_folder.open_images(str(tmp_path))
  with pytest.raises(ValueError, match="unknown data set 'photos'"):
    image_folder.open_images("photos:train", str(tmp_path))
