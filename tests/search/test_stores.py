"""What every store does, against NumPy: the same tests over files, Milvus-lite, and a server."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from tests.search.conftest import KINDS, place
from xe_retrieval.search import conditions, stores
from xe_retrieval.search.stores.store import Unavailable

WIDTH, COUNT = 8, 300
COLUMNS = {"stars": "whole", "price": "number", "my tag": "text"}
HOSTILE = [
  *(b"caf\xe9.png", b"new\nline.png", b"tab\t.png", "日本/ümlaut.png".encode(), b"quo\"te'.png"),
  *(b"back\\slash.png", b"%_.png", b"\xff\xfe/\x01.png", b" .png", b"a" * 250 + b".png"),
]
DAY = 86_400 * 10**9


class Rows:
  """What the stores are given, and the answers that NumPy gives."""

  def __init__(self, count=COUNT, seed=0, source="photos"):
    random = np.random.default_rng(seed)
    self.ids = random.permutation(random.integers(0, 2**64, count, np.uint64))
    self.vectors = random.normal(size=(count, WIDTH)).astype(np.float32)
    names = [HOSTILE[i] if i < len(HOSTILE) else b"%05d.png" % i for i in range(count)]
    number = np.arange(count)
    date = np.where(number % 4 == 0, -1, (18_000 + number) * DAY)  # from 2019-04-14 on
    day = date.astype("datetime64[ns]")
    self.columns = {
      "source": pa.array([source] * count).dictionary_encode(),
      "folder": pa.array([f"{source}/{i % 3}" for i in range(count)]).dictionary_encode(),
      "name": pa.array(names, pa.binary()),
      "date": pa.array(date, pa.int64()),
      "year": pa.array(np.where(date < 0, -1, 1970 + day.astype("datetime64[Y]").astype(int))),
      "stamp_size": pa.array(number, pa.int64()),
      "stamp_time": pa.array(number * 10**15 + 1, pa.int64()),
      "stars": pa.array([None if i % 5 == 0 else int(i) for i in number], pa.int64()),
      "price": pa.array([None if i % 7 == 0 else i / 2 for i in number], pa.float64()),
      "my tag": pa.array([None, 'a"\n', "b\\"][i % 3] for i in number),
    }

  def put(self, store, some=slice(None)):
    columns = {name: column[some] for name, column in self.columns.items()}
    store.add(self.ids[some], self.vectors[some], columns)

  def best(self, query, mask=None):
    """Scores of all, highest first."""
    scores = self.vectors @ query
    return np.sort(scores if mask is None else scores[mask])[::-1]


@pytest.fixture(scope="module")
def rows():
  return Rows()


@pytest.fixture(scope="module")
def queries():
  return np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float32)


def make(kind, path):
  text = place(kind, path)
  path.mkdir()
  return stores.create(path, stores.parse(text, path), COLUMNS, WIDTH)


def reopen(path, about, writing=False, columns=COLUMNS):
  return stores.open(path, about, columns, writing)


@pytest.fixture(params=KINDS)
def kind(request):
  return request.param


@pytest.fixture(scope="module", params=KINDS)
def filled(request, rows, tmp_path_factory):
  """For tests that only read."""
  path = tmp_path_factory.mktemp(request.param) / "index"
  store = make(request.param, path)
  rows.put(store)
  return reopen(path, store.commit())


def test_nearest(filled, rows, queries):
  ids, scores = filled.nearest(queries, 10)
  assert (ids.dtype, ids.shape, scores.dtype) == (np.uint64, (5, 10), np.float32)
  for query, found, of in zip(queries, ids, scores, strict=True):
    np.testing.assert_allclose(of, rows.best(query)[:10], rtol=1e-5)
    at = [rows.ids.tolist().index(i) for i in found.tolist()]
    np.testing.assert_allclose(rows.vectors[at] @ query, of, rtol=1e-5)
  assert len(filled) == filled.matching(None) == COUNT


def test_more_than_there_are(filled, rows, queries):
  ids, scores = filled.nearest(queries, 10 * COUNT)
  assert ids.shape == scores.shape == (5, COUNT)
  assert sorted(ids[0].tolist()) == sorted(rows.ids.tolist())
  assert filled.nearest(queries, 0)[0].shape == (5, 0)


def test_equal_scores_come_in_one_order(filled, queries):
  nothing = np.zeros_like(queries[:1])
  again = [filled.nearest(nothing, COUNT)[0].tolist() for _ in range(2)]
  assert again[0] == again[1]


def test_above_and_counts(filled, rows, queries):
  least = np.array([0, 1.5, -np.inf, np.inf, 100], np.float32)
  expected = [rows.best(q)[rows.best(q) >= low] for q, low in zip(queries, least, strict=True)]
  counted = filled.scan(queries, 3, least)[2]
  assert [len(of) for of in counted] == [len(of) for of in expected]
  for found in (filled.above(queries, least), filled.scan(queries, 3, least, listed=True)[2]):
    for one, of in zip(found, expected, strict=True):
      np.testing.assert_allclose(np.sort(one)[::-1], of, rtol=1e-5, atol=1e-6)
  assert filled.count(queries, least) == [len(of) for of in expected]
  ids, scores, _ = filled.scan(queries, 3, least)
  np.testing.assert_array_equal(ids, filled.nearest(queries, 3)[0])


def test_histogram(filled, rows, queries):
  grid = np.linspace(-3, 3, 7)
  expected = [[(rows.best(q) >= low).sum() for low in grid] for q in queries]
  np.testing.assert_array_equal(filled.histogram(queries, grid), expected)


@pytest.mark.parametrize(
  "text",
  [
    "stars > 100 and not stars in [200, 201]",
    "not stars > 100",
    'folder like "%/1" or price <= 2.5',
    'year == 2019 and date > "2019-06-01"',
    "`my tag` == 'a\"\\n'",
    'name == "caf\ufffd.png" or name like "%\\n%"',
    'source != "photos"',
  ],
)
def test_conditions(filled, rows, queries, text):
  where = conditions.parse(text, filled.columns)
  mask = where.mask(pa.table(rows.columns))
  try:
    assert filled.matching(where) == mask.sum()
  except Unavailable as e:
    if "only prefix pattern match" in str(e):
      pytest.skip("this server knows no more of `like` than a prefix")
    raise
  ids, scores = filled.nearest(queries, 10, where)
  for query, found, of in zip(queries, ids, scores, strict=True):
    np.testing.assert_allclose(of, rows.best(query, mask)[:10], rtol=1e-5)
    assert mask[[rows.ids.tolist().index(i) for i in found.tolist()]].all()
  least = np.zeros(5, np.float32)
  expected = [int((rows.best(q, mask) >= 0).sum()) for q in queries]
  assert filled.count(queries, least, where) == expected


def test_folders_and_days(filled, rows):
  day = datetime.date(2019, 7, 1)
  for where in (conditions.inside("photos"), conditions.inside("photos/2"), conditions.since(day)):
    assert filled.matching(where) == where.mask(pa.table(rows.columns)).sum() > 0
  assert filled.matching(conditions.inside("phot")) == 0


def test_what_is_known_of_images(filled, rows):
  some = np.random.default_rng(2).permutation(COUNT)[:40]
  some = np.concatenate([np.arange(len(HOSTILE)), some])
  found = filled.fetch(rows.ids[some], tuple(rows.columns))
  for name, column in rows.columns.items():
    assert list(found[name]) == column.take(pa.array(some)).to_pylist(), name
  np.testing.assert_array_equal(filled.vectors(rows.ids[some]), rows.vectors[some])
  asked = np.append(rows.ids[some], np.array([7, 2**64 - 1], np.uint64))
  assert filled.has(asked).tolist() == [True] * len(some) + [False, False]


def test_known_ids_and_stamps(filled, rows):
  ids, stamps = filled.known("photos")
  order = np.argsort(rows.ids)
  np.testing.assert_array_equal(ids, rows.ids[order])
  np.testing.assert_array_equal(stamps[:, 0], order)
  np.testing.assert_array_equal(stamps[:, 1], order * 10**15 + 1)
  ids, stamps = filled.known('nothing" or year > 0 or source == "')
  assert ids.shape == (0,) and stamps.shape == (0, 2)


def test_nothing_in_it(kind, tmp_path, queries):
  store = make(kind, tmp_path / "index")
  store = reopen(tmp_path / "index", store.commit())
  assert len(store) == 0 and store.known("photos")[0].shape == (0,)
  assert store.nearest(queries, 3)[0].shape == (5, 0)
  assert [len(x) for x in store.above(queries, np.full(5, -9, np.float32))] == [0] * 5
  assert store.count(queries, np.full(5, -9, np.float32)) == [0] * 5
  assert not store.has(np.array([1], np.uint64)).any()


def test_an_update_is_seen_when_it_is_committed(kind, tmp_path, rows, queries):
  """A reader that was opened before goes on; one that is opened afterwards sees all of it."""
  path = tmp_path / "index"
  store = make(kind, path)
  rows.put(store, slice(0, 200))
  before = store.commit()
  store = reopen(path, before, writing=True)
  reader = reopen(path, before)
  rows.put(store, slice(200, COUNT))
  assert len(reader) == 200 and reader.nearest(queries, COUNT)[0].shape == (5, 200)
  assert not reader.has(rows.ids[200:]).any() and reader.has(rows.ids[:200]).all()
  store.remove(rows.ids[:50])
  changed = Rows(50, seed=3)
  changed.ids = rows.ids[:50]
  changed.put(store, slice(0, 20))  # of these 50, 20 come again with other vectors
  after = store.commit()
  for found in (store, reopen(path, after)):
    assert len(found) == COUNT - 30 and not found.has(rows.ids[20:50]).any()
    np.testing.assert_array_equal(found.vectors(rows.ids[:20]), changed.vectors[:20])
    ids, scores = found.nearest(queries, 5)
    whole = np.concatenate([changed.vectors[:20], rows.vectors[50:]])
    expected = np.sort(queries @ whole.T, axis=1)[:, ::-1][:, :5]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert found.fetch(rows.ids[:1], ("price",))["price"] == [None]


def test_an_update_that_never_ended_is_repeated(kind, tmp_path, rows, queries):
  """Each image is there once, and what only the first attempt had is not there."""
  path = tmp_path / "index"
  store = make(kind, path)
  rows.put(store, slice(0, 100))
  about = store.commit()
  first = reopen(path, about, writing=True)
  rows.put(first, slice(100, 250))
  Rows(20, seed=4, source="other").put(first)
  again = reopen(path, about, writing=True)
  known = set(again.known("photos")[0].tolist())
  assert set(rows.ids[:100].tolist()) <= known and len(again.known("other")[0]) == 0
  rest = np.array([i for i in range(COUNT) if int(rows.ids[i]) not in known])
  columns = {name: column.take(pa.array(rest)) for name, column in rows.columns.items()}
  again.add(rows.ids[rest], rows.vectors[rest], columns)
  found = reopen(path, again.commit())
  ids, _ = found.nearest(queries, 2 * COUNT)
  assert sorted(ids[0].tolist()) == sorted(rows.ids.tolist()) and len(found) == COUNT


def test_a_column_that_comes_later(kind, tmp_path, rows):
  path = tmp_path / "index"
  store = make(kind, path)
  rows.put(store, slice(0, 10))
  more = COLUMNS | {"rating": "number", "größe": "text"}
  store = reopen(path, store.commit(), writing=True, columns=more)
  columns = {name: column[10:14] for name, column in rows.columns.items()}
  columns["rating"] = pa.array([1.5, None, 2, 3])
  columns["größe"] = pa.array(["S", "M", None, "S"])
  store.add(rows.ids[10:14], rows.vectors[10:14], columns)
  found = reopen(path, store.commit(), columns=more)
  for text, expected in (
    ("rating >= 1.5", 3),
    ("not rating >= 2", 1),
    ('größe == "S" and rating in [1.5, 3]', 2),
    ('größe not in ["S", "L"]', 1),
  ):
    assert found.matching(conditions.parse(text, found.columns)) == expected, text
  assert found.fetch(rows.ids[9:12], ("rating",)) == {"rating": [None, 1.5, None]}


def test_where_vectors_lie():
  assert stores.parse("", "i") == stores.parse("files", "i") == {"kind": "files"}
  for text in ("milvus", "milvus:vectors.db", "milvus:,photos", "qdrant:x,y"):
    with pytest.raises(ValueError, match="expected files, or milvus:URI,NAME"):
      stores.parse(text, "i")
