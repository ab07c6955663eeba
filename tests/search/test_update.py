"""A folder becomes a collection, and stays one while files come, change and go."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.search.conftest import draw, make_workdir
from xe_retrieval.calibration import artifact
from xe_retrieval.search import image_sources
from xe_retrieval.search import update as updates
from xe_retrieval.search.collection import Collection


@pytest.fixture
def update(model, workdir, tmp_path):
  def update(add=(), **options):
    add = [image_sources.Folder(f) if not hasattr(f, "entries") else f for f in add]
    return updates.update_index(tmp_path / "index", model, workdir, add, **options)

  return update


def everything(found):
  """{name: id} of a collection."""
  ids = np.concatenate([found.store.known(label)[0] for label in found.sources])
  return dict(zip(map(os.fsdecode, found.store.fetch(ids, ["name"])["name"]), ids, strict=True))


def names(tmp_path):
  return sorted(everything(Collection(tmp_path / "index")))


def vectors(found, names):
  ids = everything(found)
  return found.store.vectors(np.array([ids[name] for name in names]))


def test_a_folder(update, photos, model, tmp_path):
  report = update([photos])
  assert (report.images, report.embedded, report.removed, report.skipped) == (30, 30, 0, [])
  found = Collection(tmp_path / "index")
  assert len(found) == len(found.store) == 30
  names, ids = (list(x) for x in zip(*everything(found).items(), strict=True))
  about = found.describe(np.array(ids))
  files = [one["path"] for one in about]
  assert files == [str(photos / name) for name in names]
  np.testing.assert_allclose(
    found.store.vectors(np.array(ids)), model.embed_images(files), atol=1e-6
  )
  for id, one in zip(ids, about, strict=True):
    assert found.find(one["id"]) == id
  assert found.find("0" * 16) is None
  closest, scores = found.search(model.embed_images(files[3:5]), 3)
  assert list(closest[:, 0]) == ids[3:5] and scores[0, 0] == pytest.approx(1, abs=1e-5)
  assert found.picture(ids[3]) == (photos / names[3]).read_bytes()
  summary = found.manifest["summary"]
  assert summary["folders"] == [
    {"folder": "photos", "images": 30},
    {"folder": "photos/deeper", "images": 10},
    {"folder": "photos/deeper/still", "images": 10},
  ]
  dates = sorted(one["date"] for one in about)
  assert summary["dates"] == [dates[0], dates[-1]]
  kept = artifact.read(found.directory, model.fingerprint())
  assert kept.best.relevance == "captions" and len(kept.bank.captions) == 40


def test_only_what_is_new_or_changed(update, photos, tmp_path):
  update([photos])
  report = update([photos])
  assert not report.changed and Collection(tmp_path / "index").manifest["generation"] == "g000001"
  before = Collection(tmp_path / "index")
  draw(photos, range(40, 42))
  Image.new("RGB", (50, 40), "red").save(photos / "scene000.png")
  (photos / "scene001.png").unlink()
  report = update([photos])
  assert (report.images, report.embedded, report.removed) == (31, 3, 1)
  after = Collection(tmp_path / "index")
  old, new = everything(before), everything(after)
  assert "scene001.png" not in new and "scene041.png" in new
  same = old.keys() - {"scene000.png", "scene001.png"}
  assert all(old[name] == new[name] for name in same)  # ids stay
  np.testing.assert_array_equal(vectors(after, same), vectors(before, same))
  changed = vectors(after, ["scene000.png"]) - vectors(before, ["scene000.png"])
  assert abs(changed).max() > 0.01
  # The segment from before stays as it is; beside it are those that are new.
  assert [s["rows"] for s in after.manifest["store"]["segments"]] == [30, 3]


def test_folders_are_added_and_removed(update, photos, tmp_path):
  update([photos])
  draw(tmp_path / "more", range(50, 53))
  report = update([tmp_path / "more"])
  assert (report.images, report.embedded) == (33, 3)
  report = update(remove=[image_sources.named(str(photos))])
  assert (report.images, report.embedded, report.removed) == (3, 0, 30)
  assert names(tmp_path) == ["scene050.png", "scene051.png", "scene052.png"]
  with pytest.raises(ValueError, match="elsewhere is not in the index; it holds folder:"):
    update(remove=[image_sources.named("/elsewhere")])
  with pytest.raises(ValueError, match="there would be no images in the index"):
    update(remove=[image_sources.named(str(tmp_path / "more"))])
  assert len(names(tmp_path)) == 3


def test_bad_files_are_skipped_and_listed(update, photos, tmp_path):
  (photos / "words.jpg").write_text("words")
  (photos / "empty.png").write_bytes(b"")
  whole = (photos / "scene000.png").read_bytes()
  (photos / "half.png").write_bytes(whole[: len(whole) // 2])
  (photos / "gone.gif").symlink_to("nowhere")
  (photos / "notes.txt").write_text("not even meant")
  bomb = Image.new("1", (20_000, 20_000))
  bomb.save(photos / "bomb.png")
  strange = photos / "caf\udce9 <b>.png"  # a name that is not UTF-8
  strange.write_bytes(whole)
  report = update([photos])
  assert report.images == 31
  bad = ["bomb.png", "empty.png", "gone.gif", "half.png", "words.jpg"]
  assert [name for _, name, _ in report.skipped] == bad
  found = Collection(tmp_path / "index")
  listed = (found.directory / "skipped.tsv").read_text().splitlines()
  assert [line.split("\t")[1] for line in listed] == bad
  assert "pixels" in listed[0] and all(line.split("\t")[2] for line in listed)
  id = everything(found)["caf\udce9 <b>.png"]
  assert found.describe([id])[0]["image"] == "caf\ufffd <b>.png" and found.picture(id) == whole
  draw(tmp_path / "more", range(2))
  update([tmp_path / "more"])  # what was listed of the other folder stays listed
  listed = (Collection(tmp_path / "index").directory / "skipped.tsv").read_text().splitlines()
  assert [line.split("\t")[1] for line in listed] == bad


class Interrupted(image_sources.Folder):
  """Stops the run at some picture; counts those that were read."""

  def __init__(self, path, after):
    super().__init__(path)
    self.after, self.reads = after, 0

  def read(self, name):
    self.reads += 1
    if self.reads > self.after:
      raise KeyboardInterrupt
    return super().read(name)


def test_goes_on_after_an_interruption(update, photos, tmp_path, monkeypatch):
  monkeypatch.setattr(updates, "CHUNK", 8)
  with pytest.raises(KeyboardInterrupt):
    update([Interrupted(photos, after=19)])
  assert not (tmp_path / "index" / "collection.json").exists()
  again = Interrupted(photos, after=100)
  report = update([again])
  assert report.images == 30 and again.reads == 30 - 16  # two chunks were safe
  assert not (tmp_path / "index" / "partial").exists()


def test_another_model(update, photos, workdir, tmp_path):
  import xe_retrieval

  update([photos])
  (tmp_path / "other").mkdir()
  other = xe_retrieval.load(make_workdir(tmp_path / "other", seed=1))
  with pytest.raises(ValueError, match="was made with another model; --rebuild embeds all of it"):
    updates.update_index(
      tmp_path / "index", other, tmp_path / "other", [image_sources.Folder(photos)]
    )
  before = Collection(tmp_path / "index")
  report = updates.update_index(tmp_path / "index", other, tmp_path / "other", rebuild=True)
  assert report.embedded == 30
  after = Collection(tmp_path / "index")
  names = [*everything(before)]
  assert abs(vectors(after, names) - vectors(before, names)).max() > 0.1
  assert after.manifest["model"] == other.fingerprint()


def test_one_writer(update, photos, tmp_path):
  (tmp_path / "index").mkdir()
  with (
    updates._lock(tmp_path / "index"),
    pytest.raises(ValueError, match="another run is writing"),
  ):
    update([photos])


def test_a_data_set_with_captions_by_scann(update, data_dir, model, tmp_path):
  report = update([image_sources.parse("shapes/64:train", data_dir)], kind="scann")
  found = Collection(tmp_path / "index")
  assert len(found) == report.images and len(found.captions) > 20
  # ScaNN's files hold neither the vectors nor a pickle.
  files = [p.name for p in (tmp_path / "index" / "s000001" / "ann").iterdir()]
  assert "scann_docids.pkl" not in files and "dataset.npy" not in files
  queries = model.embed_text(list(found.captions)[:10])
  ids, scores = found.search(queries, 5)
  every = vectors(found, [*everything(found)])
  exact = -np.sort(-(queries @ every.T), axis=1)[:, :5]
  np.testing.assert_allclose(scores, exact, atol=1e-5)
  np.testing.assert_allclose(
    scores,
    np.einsum("qd,qkd->qk", queries, found.store.vectors(ids.reshape(-1)).reshape(10, 5, -1)),
    atol=1e-5,
  )
  numbers, _ = found.search_captions(queries, 1)
  assert [found.captions[i] for i in numbers[:, 0]] == list(found.captions)[:10]
  assert found.picture(ids[0, 0])[:4] == b"\x89PNG"


def test_what_is_no_source(tmp_path):
  with pytest.raises(ValueError, match="nowhere is neither a folder nor a data set"):
    image_sources.parse(str(tmp_path / "nowhere"))
  with pytest.raises(ValueError, match="holds no index; python -m xe_retrieval.index"):
    Collection(tmp_path)
