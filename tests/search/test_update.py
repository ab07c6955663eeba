"""A folder becomes a collection, and stays one while files come, change and go."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv

from tests.search.conftest import draw, make_workdir
from xe_retrieval.calibration import artifact
from xe_retrieval.search import image_sources
from xe_retrieval.search import update as updates
from xe_retrieval.search.collection import Collection
from xe_retrieval.search.stores.table_columns import TableColumns


@pytest.fixture
def update(model, workdir, tmp_path, store):
  def update(add=(), **options):
    options = {"store": store} | options
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


def test_only_what_is_new_or_changed(update, photos, tmp_path, store):
  update([photos])
  report = update([photos])
  assert not report.changed and Collection(tmp_path / "index").manifest["generation"] == "g000001"
  before = everything(Collection(tmp_path / "index"))
  was = dict(zip(before, vectors(Collection(tmp_path / "index"), before), strict=True))
  draw(photos, range(40, 42))
  Image.new("RGB", (50, 40), "red").save(photos / "scene000.png")
  (photos / "scene001.png").unlink()
  report = update([photos])
  assert (report.images, report.embedded, report.removed) == (31, 3, 1)
  after = Collection(tmp_path / "index")
  old, new = before, everything(after)
  assert "scene001.png" not in new and "scene041.png" in new
  same = old.keys() - {"scene000.png", "scene001.png"}
  assert all(old[name] == new[name] for name in same)  # ids stay
  np.testing.assert_array_equal(vectors(after, same), [was[name] for name in same])
  changed = vectors(after, ["scene000.png"]) - was["scene000.png"]
  assert abs(changed).max() > 0.01
  if store != "files":
    return
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


def test_work_of_another_folder_is_kept(update, photos, tmp_path, monkeypatch):
  monkeypatch.setattr(updates, "CHUNK", 8)
  draw(tmp_path / "more", range(50, 53))
  with pytest.raises(KeyboardInterrupt):
    update([Interrupted(photos, after=19)])
  assert update([tmp_path / "more"]).images == 3
  again = Interrupted(photos, after=100)
  report = update([again])
  assert (report.images, report.embedded, again.reads) == (33, 30, 30 - 16)
  assert not (tmp_path / "index" / "partial").exists()


def test_a_picture_that_changes_between_interrupted_runs(update, photos, tmp_path, monkeypatch):
  monkeypatch.setattr(updates, "CHUNK", 8)
  with pytest.raises(KeyboardInterrupt):
    update([Interrupted(photos, after=19)])
  Image.new("RGB", (50, 40), "red").save(photos / "deeper" / "still" / "scene020.png")
  (photos / "deeper" / "still" / "scene021.png").unlink()
  again = Interrupted(photos, after=100)
  assert update([again]).images == 29 and again.reads == 29 - 14
  Image.new("RGB", (50, 40), "red").save(photos / "red.png")
  update([photos])
  same = vectors(Collection(tmp_path / "index"), ["red.png", "deeper/still/scene020.png"])
  np.testing.assert_allclose(same[0], same[1], atol=1e-5)


def test_names_with_newlines_and_tabs(update, photos, tmp_path):
  whole = (photos / "scene000.png").read_bytes()
  odd = "a\nb\tc\\n\udce9.png"
  (photos / "new\nline").mkdir()
  (photos / "new\nline" / odd).write_bytes(whole)
  (photos / "bad\n\t\\t.png").write_bytes(b"no picture")
  report = update([photos])
  draw(tmp_path / "more", range(2))
  again = update([tmp_path / "more"])
  assert report.skipped == again.skipped and report.skipped[0][1] == "bad\n\t\\t.png"
  found = Collection(tmp_path / "index")
  id = everything(found)[f"new\nline/{odd}"]
  assert found.picture(id) == whole
  about = found.describe([id])[0]
  assert about["folder"] == "photos/new\nline" and about["image"].endswith("a\nb\tc\\n\ufffd.png")
  assert not update([photos]).changed


def test_two_images_with_one_id(update, photos, tmp_path, monkeypatch):
  ids = image_sources.ids
  last = lambda names: [b"0.png" if n in (b"scene004.png", b"scene007.png") else n for n in names]  # noqa: E731
  monkeypatch.setattr(image_sources, "ids", lambda key, names: ids(key, last(names)))
  with pytest.raises(ValueError, match="'scene004.png' and 'scene007.png' have the same id"):
    update([photos])
  assert not (tmp_path / "index" / "collection.json").exists()
  monkeypatch.setattr(image_sources, "ids", lambda key, names: ids("", names))
  update([photos])
  draw(tmp_path / "more", range(1))
  with pytest.raises(
    ValueError, match="'scene000.png' has the same id as 'scene000.png' of photos"
  ):
    update([tmp_path / "more"])
  assert len(names(tmp_path)) == 30


def test_a_source_keeps_its_label(update, photos, tmp_path):
  draw(tmp_path / "other" / "photos", range(60, 62))
  draw(tmp_path / "third" / "photos", range(70, 71))
  update([photos])
  update([tmp_path / "other" / "photos"])
  labels = lambda: [*Collection(tmp_path / "index").sources]  # noqa: E731
  assert labels() == ["photos", "photos (2)"]
  update(remove=[image_sources.named(str(photos))])
  assert labels() == ["photos (2)"]
  found = Collection(tmp_path / "index")
  assert found.manifest["summary"]["folders"] == [{"folder": "photos (2)", "images": 2}]
  update([tmp_path / "third" / "photos"])
  assert labels() == ["photos (2)", "photos"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_of_a_table(update, photos, tmp_path, kind):
  shown = [("scene000.png", 7, 0.5, "me"), ("deeper/still/scene020.png", None, 2, "é, x")]
  rows = [dict(zip(("image", "views", "share", "by"), x, strict=True)) for x in shown]
  path = tmp_path / f"table.{kind}"
  _write_table(path, rows)
  update([photos])
  report = update([photos], columns=path)
  assert (report.changed, report.embedded, report.images) == (True, 0, 30)
  found = Collection(tmp_path / "index")
  types = {"views": "whole", "share": "number", "by": "text"}
  assert found.manifest["columns"] == types and types.items() <= found.store.columns.items()
  ids = [
    everything(found)[x] for x in ("deeper/still/scene020.png", "scene000.png", "scene001.png")
  ]
  values = found.store.fetch(np.array(ids), ["views", "share", "by"])
  assert values == {"views": [None, 7, None], "share": [2, 0.5, None], "by": ["é, x", "me", None]}
  assert not update([photos], columns=path).changed
  rows[0]["views"] = 8
  _write_table(path, rows)
  assert update([photos], columns=path).changed
  found = Collection(tmp_path / "index")
  assert found.store.fetch(np.array(ids[1:2]), ["views"])["views"] == [8]
  rows[0]["views"] = "many"
  _write_table(path, rows)
  with pytest.raises(ValueError, match="column 'views' is text, but whole in the index; --rebuild"):
    update([photos], columns=path)
  assert update([photos], columns=path, rebuild=True).embedded == 30


def test_a_second_table_leaves_the_columns_of_the_first(update, photos, tmp_path, monkeypatch):
  """What it changes is written again, nothing else; an image that changes keeps what is known."""
  names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
  path, stars = tmp_path / "stars.csv", {name: i % 5 for i, name in enumerate(names)}
  rows = [{"image": name, "stars": stars[name], "share": i / 4} for i, name in enumerate(names[:9])]
  _write_table(path, rows)
  update([photos], columns=path)

  def values(column):
    found = Collection(tmp_path / "index")
    ids = np.array([everything(found)[name] for name in names])
    return list(found.store.fetch(ids, [column])[column])

  added, cls = [], type(Collection(tmp_path / "index").store)
  plain = cls.add
  monkeypatch.setattr(cls, "add", lambda *args: (added.append(len(args[1])), plain(*args)))
  known = [*range(5), *range(4)] + [None] * 21
  second = tmp_path / "tags.csv"
  _write_table(second, [{"image": name, "tag": f"t{name}"} for name in names[2:6]])
  assert update([photos], columns=second).changed and added == [4]
  tags = [f"t{name}" if 2 <= i < 6 else None for i, name in enumerate(names)]
  assert values("stars") == known and values("tag") == tags
  rows[3]["stars"] = known[3] = 77
  _write_table(path, rows)
  assert update([photos], columns=path).changed and added == [4, 1]
  assert values("stars") == known and values("tag") == tags
  assert not update([photos], columns=second).changed and added == [4, 1]
  Image.new("RGB", (16, 16)).save(photos / names[3])
  draw(photos, range(50, 51))
  assert update([photos]).embedded == 2
  assert values("stars") == known and values("tag") == tags
  assert values("share") == [i / 4 for i in range(9)] + [None] * 21


def _write_table(path, rows):
  table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
  if path.suffix == ".parquet":
    pq.write_table(table, path)
  elif path.suffix == ".jsonl":
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  else:
    options = csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
    csv.write_csv(table, path, options)


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    (
      "picture,views\na,1\n",
      "has no column 'image', the names of the images; it has picture, views",
    ),
    ("image\na\n", "has no column besides 'image'"),
    ("image,x\na,1\na,2\n", "image 'a' is in more than one row"),
    ("image,folder\na,1\n", "column 'folder' is taken; rename it"),
    ("image,how many\na,1\n", "column 'how many' is no plain name"),
    ("image,x\na\n", "cannot be read as a table: .*Expected 2 columns, got 1"),
  ],
)
def test_tables_that_are_wrong(tmp_path, text, sentence):
  path = tmp_path / "table.csv"
  path.write_text(text)
  with pytest.raises(ValueError, match=sentence):
    TableColumns(path)
  with pytest.raises(ValueError, match="should be a table that ends in .tsv, .csv"):
    TableColumns(tmp_path / "table.xls")
  with pytest.raises(ValueError, match="nowhere.csv cannot be read as a table"):
    TableColumns(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("store", ["files"], indirect=True)
def test_float16_and_back(update, photos, tmp_path):
  update([photos])
  exact = vectors(Collection(tmp_path / "index"), names(tmp_path))
  update([photos], precision="float16")
  assert not update([photos]).changed  # it stays what it is
  found = Collection(tmp_path / "index")
  assert found.store.segments[0].vectors.dtype == np.float16
  half = vectors(found, names(tmp_path))
  assert 0 < abs(half - exact).max() < 1e-3
  assert update([photos], precision="float32").changed


@pytest.mark.parametrize("store", ["files"], indirect=True)
def test_the_audit_asks_in_words(update, photos, data_dir, tmp_path):
  """Training captions where the collection has none; nothing to audit where all is compared."""
  update([photos])
  exact = Collection(tmp_path / "index").manifest["audit"]
  assert (exact["recall_at_10"], exact["queries"]) == (1.0, 0)
  update([photos], kind="scann")
  audit = Collection(tmp_path / "index").manifest["audit"]
  assert audit["asked"] == "training captions" and audit["queries"] == 20
  assert audit["recall_at_10"] > 0.9
  update([image_sources.parse("shapes/64:train", data_dir)], kind="scann")
  assert Collection(tmp_path / "index").manifest["audit"]["asked"] == "captions of the collection"


def test_an_index_of_the_format_before(tmp_path, update, photos):
  (tmp_path / "index").mkdir()
  (tmp_path / "index" / "collection.json").write_text('{"format": 1, "generation": "g000001"}')
  with pytest.raises(ValueError, match="has format 1, this version reads 2: index anew"):
    update([photos])


def test_another_model(update, photos, workdir, tmp_path):
  import xe_retrieval

  update([photos])
  (tmp_path / "other").mkdir()
  other = xe_retrieval.load(make_workdir(tmp_path / "other", seed=1))
  with pytest.raises(ValueError, match="was made with another model; --rebuild embeds all of it"):
    updates.update_index(
      tmp_path / "index", other, tmp_path / "other", [image_sources.Folder(photos)]
    )
  names = [*everything(Collection(tmp_path / "index"))]
  before = vectors(Collection(tmp_path / "index"), names)
  report = updates.update_index(tmp_path / "index", other, tmp_path / "other", rebuild=True)
  assert report.embedded == 30
  after = Collection(tmp_path / "index")
  assert abs(vectors(after, names) - before).max() > 0.1
  assert after.manifest["model"] == other.fingerprint()


def test_one_writer(update, photos, tmp_path):
  (tmp_path / "index").mkdir()
  with (
    updates._lock(tmp_path / "index"),
    pytest.raises(ValueError, match="another run is writing"),
  ):
    update([photos])


def test_a_data_set_with_captions_by_scann(update, data_dir, model, tmp_path):
  source = image_sources.parse("shapes/64:train", data_dir)
  report = update([source], kind="scann", store="files")
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


@pytest.mark.parametrize("store", ["files"], indirect=True)
def test_folders_that_are_not_ours_stay(update, tmp_path):
  """An index of before may lie among pictures: there was no check of where --out is."""
  draw(tmp_path / "photos", range(3))
  update([tmp_path / "photos"])
  others = [f"index/{name}" for name in ("s1-holiday", "s01", "s000077", "g1-x", "g000099")]
  for other in others:
    draw(tmp_path / other, range(1))
  draw(tmp_path / "photos", range(3, 5))
  assert update([tmp_path / "photos"]).images == 5
  assert all((tmp_path / other / "scene000.png").exists() for other in others)
  draw(tmp_path / "photos", range(5, 6))
  update([tmp_path / "photos"])
  draw(tmp_path / "photos", range(6, 7))
  update([tmp_path / "photos"])  # what is ours goes: two generations are left
  made = [path.parent.name for path in (tmp_path / "index").glob("g*/captions.npy")]
  assert len(made) == 2


@pytest.mark.parametrize("store", ["files"], indirect=True)
def test_a_new_index_lies_apart_from_the_pictures(model, workdir, tmp_path, store):
  draw(tmp_path / "pictures" / "photos", range(2))
  folder = image_sources.Folder(tmp_path / "pictures" / "photos")
  for out, how in (("pictures", "around"), ("pictures/photos", "in"), ("pictures/photos/i", "in")):
    with pytest.raises(ValueError, match=f"{out} lies {how} the folder of pictures .*photos; give"):
      updates.update_index(tmp_path / out, model, workdir, [folder])
  assert sorted(p.name for p in (tmp_path / "pictures").rglob("*")) == [
    *("photos", "scene000.png", "scene001.png")
  ]
  updates.update_index(tmp_path / "pictures" / "index", model, workdir, [folder])
  deeper = image_sources.Folder(tmp_path / "pictures")  # the index is there already
  updates.update_index(tmp_path / "pictures" / "index", model, workdir, [deeper])
