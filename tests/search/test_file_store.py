"""Files on disk: what is added, removed, merged and found, against the obvious computation."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from xe_retrieval.search import conditions, stores
from xe_retrieval.search.stores import condition_tree, files, segments

WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Folder:
  """A condition."""

  name: str

  def names(self):
    return {"folder"}

  def mask(self, table):
    return np.array(table["folder"].to_pylist()) == self.name


class Plain:
  """The obvious: dictionaries and one product."""

  def __init__(self):
    self.vectors, self.folders = {}, {}

  def add(self, ids, vectors, columns):
    self.vectors |= zip(ids.tolist(), vectors, strict=True)
    self.folders |= zip(ids.tolist(), columns["folder"].to_pylist(), strict=True)

  def remove(self, ids):
    for id in ids.tolist():
      self.vectors.pop(id, None)

  def scores(self, queries, where=None):
    ids = [i for i in self.vectors if where is None or self.folders[i] == where.name]
    return ids, queries @ np.stack([self.vectors[i] for i in ids]).T


def rows(ids, random, source="photos", **more):
  """Unit vectors and columns of images."""
  vectors = random.standard_normal((len(ids), WIDTH)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  number = pa.array(ids.astype(np.int64))
  columns = {
    "source": pa.array([source] * len(ids)),
    "folder": pa.array([f"{source}/{i % 3}" for i in ids.tolist()]),
    "name": pa.array([b"%d\n\xff" % i for i in ids.tolist()]),
    "date": number,
    "year": pa.array(np.full(len(ids), 1970)),
    "stamp_size": number,
    "stamp_time": number,
  }
  return ids, vectors, columns | {name: pa.array(values) for name, values in more.items()}


def new(path, index="exact", precision="float32", columns=None):
  about = {"kind": "files", "index": index, "precision": precision}
  return stores.create(path, about, columns or {}, WIDTH)


def again(path, about, writing=True, columns=None):
  return stores.open(path, about, columns or {}, writing)


def assert_same(store, plain, precise=True):
  queries = np.random.default_rng(9).standard_normal((5, WIDTH)).astype(np.float32)
  for where in (None, Folder("photos/1")):
    ids, scores = plain.scores(queries, where)
    found, got = store.nearest(queries, 7, where, exact=True)
    best = -np.sort(-scores, axis=1)[:, :7]
    np.testing.assert_allclose(got, best, atol=1e-5 if precise else 5e-3)
    if precise:
      assert (found == np.array(ids, np.uint64)[np.argsort(-scores, axis=1)[:, :7]]).all()
      expected = (scores >= 0.2).sum(axis=1).tolist()
      assert store.count(queries, [0.2] * 5, where) == expected
      assert [len(x) for x in store.above(queries, [0.2] * 5, where)] == expected
      *_, above = store.scan(queries, 3, [0.2] * 5, where, exact=True)
      assert [len(x) for x in above] == expected
      if where is None:
        assert store.histogram(queries, np.array([-99, 0.2])).T.tolist() == [
          [len(ids)] * 5,
          expected,
        ]
    assert store.matching(where) == len(ids)
  ids = np.array(list(plain.vectors), np.uint64)
  assert len(store) == len(ids) and store.has(ids).all()
  vectors = np.stack(list(plain.vectors.values()))
  np.testing.assert_allclose(store.vectors(ids), vectors, atol=1e-6 if precise else 1e-3)
  assert store.fetch(ids, ["folder"])["folder"] == [plain.folders[i] for i in ids.tolist()]


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("index", ["exact", "scann"])
def test_random_updates(tmp_path, index, precision, monkeypatch):
  """Segments are cut, merged and rewritten on the way."""
  monkeypatch.setattr(files, "LARGEST", 300)
  monkeypatch.setattr(files, "EXACT_BELOW", 100)
  monkeypatch.setattr(files, "MOST_SMALL", 3)
  monkeypatch.setattr(files, "_WORTH_SCANN", 50)
  random, plain, about = np.random.default_rng(0), Plain(), None
  store = new(tmp_path, index, precision)
  for turn in range(8):
    fresh = random.permutation(5000)[: [700, 5, 40][turn % 3]].astype(np.uint64)
    fresh = fresh[[int(i) not in plain.vectors for i in fresh]]
    held = np.array(list(plain.vectors), np.uint64)
    gone = random.permutation(held)[: len(held) // 4]
    replaced = gone[:9]
    for one in (store, plain):
      one.remove(gone)
    for some in (fresh, replaced):
      batch = rows(some, random)
      store.add(*batch)
      plain.add(*batch)
    before, about = about, store.commit()
    store.swept(before or {})
    store = again(tmp_path, about)
    assert_same(store, plain, precision == "float32")
    assert all(segment["rows"] <= 300 for segment in about["segments"])
    assert len(about["segments"]) <= 3 + len(plain.vectors) // 50
    on_disk = {path.name for path in tmp_path.glob("s*")}
    named = {s["name"] for a in (before or {"segments": []}, about) for s in a["segments"]}
    assert on_disk == named
    if index == "scann":
      assert any(segment["ann"] for segment in about["segments"])
      queries = random.standard_normal((4, WIDTH)).astype(np.float32)
      ids, scores = again(tmp_path, about, writing=False).nearest(queries, 10)
      assert all(len(set(x)) == 10 for x in ids.tolist()) and store.has(ids.reshape(-1)).all()
      exact = store.nearest(queries, 10, exact=True)[0]
      assert np.mean([len(set(a) & set(b)) for a, b in zip(ids, exact, strict=True)]) > 7


def test_what_is_appended_leaves_the_rest_as_it_is(tmp_path, monkeypatch):
  monkeypatch.setattr(files, "EXACT_BELOW", 100)
  random = np.random.default_rng(0)
  store = new(tmp_path, "auto")
  store.add(*rows(np.arange(400, dtype=np.uint64), random))
  first = store.commit()
  assert first["segments"][0]["ann"]
  files_of = lambda: {  # noqa: E731
    path: (path.stat().st_mtime_ns, path.stat().st_ino)
    for path in (tmp_path / "s000001").rglob("*")
    if path.is_file()
  }
  before = files_of()
  store = again(tmp_path, first)
  store.add(*rows(np.arange(400, 410, dtype=np.uint64), random))
  store.remove(np.array([3], np.uint64))
  second = store.commit()
  assert [(s["rows"], s["ann"]) for s in second["segments"]] == [(400, True), (10, False)]
  after = files_of()
  assert before.items() <= after.items() and len(after) == len(before) + 1  # what was removed
  # A reader of the generation before still sees it.
  assert len(again(tmp_path, first)) == 400 and len(again(tmp_path, second)) == 409


def test_names_of_any_bytes_and_missing_columns(tmp_path):
  random, ids = np.random.default_rng(0), np.arange(4, dtype=np.uint64)
  store = new(tmp_path)
  store.add(*rows(ids[:2], random))
  about = store.commit()
  columns = {"views": "whole", "by": "text"}
  store = again(tmp_path, about, columns=columns)
  store.add(*rows(ids[2:], random, views=[5, None], by=["me", None]))
  store = again(tmp_path, store.commit(), columns=columns)
  found = store.fetch(ids[[3, 0, 2]], ["name", "views", "by", "date"])
  assert found["name"] == [b"3\n\xff", b"0\n\xff", b"2\n\xff"]
  assert found["views"] == [None, None, 5] and found["by"] == [None, None, "me"]
  assert found["date"].tolist() == [3, 0, 2]
  assert store.columns | columns == store.columns and store.columns["date"] == "date"


def test_known_of_a_source(tmp_path):
  random = np.random.default_rng(0)
  store = new(tmp_path)
  store.add(*rows(np.array([9, 2, 7], np.uint64), random))
  store.add(*rows(np.array([4], np.uint64), random, source="more"))
  about = store.commit()
  store = again(tmp_path, about)
  store.remove(np.array([7], np.uint64))
  ids, stamps = store.known("photos")
  assert ids.tolist() == [2, 9] and stamps.tolist() == [[2, 2], [9, 9]]
  assert [len(x) for x in store.known("nothing")] == [0, 0]
  assert store.has(np.array([7, 4, 5], np.uint64)).tolist() == [False, True, False]


def test_everything_is_synced_before_it_counts(tmp_path, monkeypatch):
  """Each file and directory that a commit makes, and the directory above."""
  synced = []
  sync = segments.sync
  monkeypatch.setattr(segments, "sync", lambda path: (synced.append(str(path)), sync(path)))
  store = new(tmp_path, "scann")
  store.add(*rows(np.arange(40, dtype=np.uint64), np.random.default_rng(0)))
  about = store.commit()
  store = again(tmp_path, about)
  store.remove(np.arange(3, dtype=np.uint64))
  store.commit()
  there = {str(path) for path in tmp_path.rglob("*")} | {str(tmp_path)}
  assert there == set(synced) and any("removed-" in path for path in there)


def test_few_neighbours_in_an_empty_or_tiny_store(tmp_path):
  store = new(tmp_path)
  query = np.ones((2, WIDTH), np.float32)
  ids, scores = store.nearest(query, 5)
  assert ids.shape == scores.shape == (2, 0) and ids.dtype == np.uint64
  assert store.count(query, [0, 0]) == [0, 0] and len(store) == 0
  store.add(*rows(np.array([1], np.uint64), np.random.default_rng(0)))
  store = again(tmp_path, store.commit())
  assert store.nearest(query, 5)[0].tolist() == [[1], [1]]
  assert store.nearest(query, 5, Folder("elsewhere"))[0].shape == (2, 0)


def test_where_vectors_lie(tmp_path):
  assert stores.parse("", tmp_path) == {"kind": "files"}
  found = {"kind": "milvus", "uri": "http://host:19530", "name": "photos"}
  assert (
    stores.parse("milvus:http://host:19530,photos", tmp_path)
    == found
    == stores.place(found | {"x": 1})
  )
  for wrong in ("milvus:", "milvus:file.db", "postgres:x,y", "milvus:,name"):
    with pytest.raises(ValueError, match="expected files, or milvus:URI,NAME"):
      stores.parse(wrong, tmp_path)


def test_scann_where_many_rows_are_gone(tmp_path):
  """It is never asked for more neighbours than there are rows."""
  random, plain = np.random.default_rng(0), Plain()
  store = new(tmp_path, "scann")
  batch = rows(np.arange(500, dtype=np.uint64), random)
  store.add(*batch)
  plain.add(*batch)
  about = store.commit()
  queries = random.standard_normal((3, WIDTH)).astype(np.float32)
  ids, scores = plain.scores(queries)
  gone = np.array(ids, np.uint64)[np.argsort(-scores[0])[:160]]  # the nearest of the first query
  store = again(tmp_path, about)
  store.remove(gone)
  plain.remove(gone)
  store = again(tmp_path, store.commit())
  assert store.segments[0].about["ann"]
  for k in (1, 50, 125, 330, 340):
    found, scores = store.nearest(queries, k)
    assert found.shape == (3, k) and not np.isin(found, gone).any() and store.has(found[0]).all()
    assert all(len(set(one)) == k for one in found.tolist())


def test_of_what_is_removed_two_generations_are_kept(tmp_path):
  store = new(tmp_path)
  store.add(*rows(np.arange(40, dtype=np.uint64), np.random.default_rng(0)))
  about = store.commit()
  for id in range(5):
    store = again(tmp_path, about)
    store.remove(np.array([id], np.uint64))
    before, about = about, store.commit()
    store.swept(before)
    left = sorted(path.stem for path in tmp_path.rglob("removed-*.npy"))
    assert left == [f"removed-{number:06d}" for number in range(max(id, 1), id + 2)]
    assert len(again(tmp_path, before)) == 40 - id and len(again(tmp_path, about)) == 39 - id


def test_names_of_other_encodings_are_read_once(tmp_path, monkeypatch):
  store = new(tmp_path)
  store.add(*rows(np.arange(300, dtype=np.uint64), np.random.default_rng(0)))
  about, seen = store.commit(), []
  plain = condition_tree._shown
  monkeypatch.setattr(condition_tree, "_shown", lambda x: (seen.append(len(x)), plain(x))[1])
  store = again(tmp_path, about)
  assert store.matching(conditions.parse('folder like "photos/%"', store.columns)) == 300
  assert not seen
  for text, count in (("7%", 11), ("%9\\n\ufffd", 30), ("%77%", 3), ("2%\ufffd", 111)):
    assert store.matching(conditions.parse(f'name like "{text}"', store.columns)) == count
  assert seen.count(300) == 1


def test_folders_leave_the_masks_of_filters(tmp_path):
  store = new(tmp_path)
  store.add(*rows(np.arange(30, dtype=np.uint64), np.random.default_rng(0)))
  store = again(tmp_path, store.commit())
  assert store.any_matches(Folder("photos/1")) and not store.any_matches(Folder("elsewhere"))
  assert store._masks.cache_info().currsize == 0
  store.remove(np.arange(1, 30, 3, dtype=np.uint64))
  assert not store.any_matches(Folder("photos/1")) and store.any_matches(None)
