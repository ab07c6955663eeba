"""What embed wrote becomes a collection, as if its pictures had been indexed themselves."""

import re
import types

import numpy as np
import pytest
from PIL import Image

from tests.embed.conftest import BROKEN, HOSTILE, PICTURES
from tests.search.conftest import calibration, draw, make_workdir
from xe_retrieval import index as index_command
from xe_retrieval.calibration import run as runs
from xe_retrieval.embed import directory, embedded_source, part
from xe_retrieval.search import generation, image_sources
from xe_retrieval.search.collection import Collection

TOTAL = PICTURES + len(HOSTILE)


@pytest.fixture
def calibrated(workdir, model):
  calibration(model).write(workdir)
  return workdir


@pytest.fixture
def vectors(model, source, tmp_path):
  for number in (1, 2, 3):
    part.run(model, source, tmp_path / "vectors", number, 3)
  return tmp_path / "vectors"


def held(index):
  """{id: (name, stamp, vector)}"""
  collection = Collection(index)
  (source,) = collection.manifest["sources"]
  ids, _ = collection.store.known(source["label"])
  found = collection.store.fetch(ids, ("name", "stamp_size", "stamp_time", "folder", "year"))
  rows = zip(*found.values(), strict=True)
  vectors = collection.store.vectors(ids)
  return {i: (row, v) for i, row, v in zip(ids.tolist(), rows, vectors, strict=True)}


def same(one, other):
  assert one.keys() == other.keys()
  for id, (row, vector) in one.items():
    assert row == other[id][0]
    np.testing.assert_allclose(vector, other[id][1], atol=1e-6)


def test_as_if_the_folder_had_been_indexed(calibrated, vectors, source, tmp_path, monkeypatch):
  taken, direct = tmp_path / "taken", tmp_path / "direct"
  report = index_command.index(calibrated, [str(vectors)], str(taken))
  assert (report.images, report.embedded, len(report.skipped)) == (TOTAL, TOTAL, len(BROKEN))
  index_command.index(calibrated, [str(source.path)], str(direct))
  same(held(taken), held(direct))
  one, other = (Collection(path).manifest for path in (taken, direct))
  assert one["sources"] == other["sources"] and one["summary"] == other["summary"]
  skipped = [generation.read_skipped(Collection(p), source.key) for p in (taken, direct)]
  assert sorted(skipped[0]) == sorted(skipped[1])
  # Later, only what has changed is embedded.
  report = index_command.index(calibrated, [str(source.path)], str(taken))
  assert not report.changed
  draw(source.path, range(60, 62))
  Image.new("RGB", (50, 40), "red").save(source.path / "scene001.png")
  (source.path / "scene002.png").unlink()
  report = index_command.index(calibrated, [str(source.path)], str(taken))
  assert (report.images, report.embedded, report.removed) == (TOTAL + 1, 3, 1)
  report = index_command.index(calibrated, [str(vectors)], str(taken))  # as it was
  assert report.images == TOTAL
  same(held(taken), held(direct))
  draw(tmp_path / "more", range(3))
  index_command.index(calibrated, [str(tmp_path / "more")], str(taken))
  report = index_command.index(calibrated, out=str(taken), remove=[str(vectors)])
  assert report.images == 3 and report.removed == TOTAL


def test_a_data_set(calibrated, model, data_dir, tmp_path):
  source = image_sources.parse("shapes/64:train", data_dir)
  for number in (1, 2):
    part.run(model, source, tmp_path / "vectors", number, 2)
  report = index_command.index(calibrated, [str(tmp_path / "vectors")], str(tmp_path / "taken"))
  assert report.embedded == report.images == source.count()
  index_command.index(calibrated, [source.label], str(tmp_path / "direct"), data_dir=data_dir)
  same(held(tmp_path / "taken"), held(tmp_path / "direct"))
  assert len(Collection(tmp_path / "taken").captions) > 20


def test_what_is_refused(calibrated, model, vectors, source, tmp_path):
  def refused(sentence, workdir=calibrated):
    with pytest.raises(ValueError, match=sentence):
      index_command.index(workdir, [str(vectors)], str(tmp_path / "index"))
    assert not (tmp_path / "index" / "collection.json").exists()

  (tmp_path / "other").mkdir()
  other = make_workdir(tmp_path / "other", seed=1)
  refused(r"vectors holds vectors of another model \(step 0\)", other)
  (file,) = directory.folder(vectors, 2, 3).glob("*.parquet")
  whole = file.read_bytes()
  for at in range(8, len(whole), 211):  # the size stays
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    refused(re.escape(str(file)) + " is damaged")
  file.write_bytes(whole[:-1])
  refused(re.escape(str(file)) + " has .* bytes instead of")
  file.write_bytes(whole)
  for number in (1, 3):
    directory.marker(vectors, number, 3).unlink()
  refused("is not complete: of 3 parts, these are not done: 1,3; embed them first")
  (vectors / "embedding.json").write_text('{"format": 7}')
  refused("has format 7, this version reads 1: embed anew")


def test_as_distractors(vectors, model, tmp_path):
  """Unit vectors, whatever rides along."""
  run = runs.Run.__new__(runs.Run)
  run.fingerprint = model.fingerprint()
  images = run._images(str(vectors))
  names = [e.name for e in embedded_source.parse(str(vectors), "", model.fingerprint).entries()]
  folder = tmp_path / "photos"
  expected = model.embed_images([folder / name for name in names])
  np.testing.assert_allclose(images.vectors, expected, atol=1e-6)
  assert len(names) == TOTAL and images.captions is None
  run.fingerprint = "another"
  with pytest.raises(ValueError, match="vectors holds vectors of another model"):
    run._images(str(vectors))


def test_what_rides_along_is_taken_and_left(model, source, tmp_path):
  """As for a model with a bank: Scoring.image adds two dimensions."""
  wider = types.SimpleNamespace(
    width=10, dim=8, image=lambda v: np.concatenate([v, v[:, :1], np.ones_like(v[:, :1])], axis=1)
  )
  known = model.scoring
  try:
    model.scoring = wider
    part.run(model, source, tmp_path / "wide", 1, 1)
  finally:
    model.scoring = known
  there = embedded_source.open_directory(tmp_path / "wide", model.fingerprint())
  (table,) = there.tables()
  assert table.schema.field("vector").type.list_size == 10
  plain = there.vectors()
  assert plain.shape == (TOTAL, 8)
  np.testing.assert_allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-5)


def test_in_a_bucket(model, source, bucket, tmp_path):
  out = bucket / "vectors"
  for number in (1, 2):
    report = part.run(model, source, out, number, 2)
  assert report.embedded and "is done" in str(part.run(model, source, out, 1, 2))
  status = directory.status(out)
  assert (status.done, status.pictures, status.skipped) == (2, TOTAL, len(BROKEN))
  done = directory.read_done(out, status.plan, 1)
  assert sum(len(t) for _, t in directory.read_files(out, status.plan, done)) == done.pictures
  draw(source.path, range(60, 64))
  assert sum(part.run(model, source, out, i, 2, update=True).embedded for i in (1, 2)) == 4
  directory.marker(out, 2, 2).unlink()
  assert directory.status(out).missing == [2]
  other = image_sources.Folder(tmp_path)
  with pytest.raises(ValueError, match="holds embeddings of 'folder:"):
    part.run(model, other, out, 1, 2)
  with pytest.raises(ValueError, match="reading embeddings needs a local directory"):
    embedded_source.open_directory(out, model.fingerprint())
