"""What only a Milvus server does, that of XE_MILVUS: approximate indexes, pages, kills."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.search import test_stores
from tests.search.conftest import place
from tests.search.test_stores import COLUMNS, COUNT, WIDTH, Rows
from xe_retrieval.search import conditions, stores
from xe_retrieval.search.stores import milvus

LARGE = 5_000  # rows; of fewer than 1,024 a server builds no index


@pytest.fixture(scope="module")
def rows():
  return Rows(LARGE)


@pytest.fixture(scope="module")
def queries():
  return np.random.default_rng(1).normal(size=(20, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def large(rows, tmp_path_factory):
  path = tmp_path_factory.mktemp("server") / "index"
  store = test_stores.make("server", path)
  rows.put(store)
  return path, store.commit()


def recall(found, queries, rows, mask=None):
  expected = [rows.best(query, mask)[:10] for query in queries]
  ids, scores = found
  rights = [np.sum(of[:10] >= best[-1] - 1e-5) for of, best in zip(scores, expected, strict=True)]
  return np.mean(rights) / 10


def test_pages(large, rows, queries, monkeypatch):
  """More scores than a page has are listed by ceilings, and all are counted."""
  store = stores.open(*large, COLUMNS)
  monkeypatch.setattr(milvus, "FIRST", 100)
  monkeypatch.setattr(milvus, "PAGE", 700)
  least = [0.5, -1]
  for query, low, found in zip(queries, least, store.above(queries[:2], least), strict=False):
    best = rows.best(query)
    assert abs(len(found) - np.count_nonzero(best >= low)) <= 1  # one may be beside the border
    np.testing.assert_allclose(np.sort(found)[::-1][:500], best[:500], rtol=1e-4)


@pytest.mark.parametrize("kind", ["HNSW", "SCANN"])
def test_approximate_indexes(large, rows, queries, kind):
  path, about = large
  about = about | {"index": kind.lower() if kind == "SCANN" else "auto"}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(milvus, "EXACT_BELOW", 1_000)
    writer = stores.open(path, about, COLUMNS, writing=True)
    built = writer.commit()
  assert built["built"] == kind
  store = stores.open(path, built, COLUMNS)
  assert store.approximate and store.histogram(queries, [0]) is None
  where = conditions.parse("stars > 2500", store.columns)
  mask = np.array([x is not None and x > 2500 for x in rows.columns["stars"].to_pylist()])
  assert recall(store.nearest(queries, 10), queries, rows) > 0.95
  assert recall(store.nearest(queries, 10, exact=True), queries, rows) > 0.99
  assert recall(store.nearest(queries, 10, where), queries, rows, mask) > 0.9
  least = np.ones(20, np.float32)
  expected = np.array([np.count_nonzero(rows.best(query) >= 1) for query in queries])
  assert store.scan(queries, 3, least)[2] is None
  some = {"HNSW": 0.9, "SCANN": 0.8}[
    kind
  ]  # of ScaNN, range search looks at an eighth of the leaves
  for counts in (
    np.array(store.count(queries, least)),
    np.array([len(of) for of in store.scan(queries, 3, least, exact=True)[2]]),
  ):
    assert (counts <= expected + 1).all() and counts.sum() > some * expected.sum()
  assert store.matching(None) == LARGE and store.matching(where) == mask.sum()
  back = stores.open(path, built | {"index": "exact"}, COLUMNS, writing=True).commit()
  assert back["built"] == "FLAT"
  assert recall(stores.open(path, back, COLUMNS).nearest(queries, 10), queries, rows) == 1


WRITE = """
import pathlib, sys
from tests.search import test_stores
from xe_retrieval.search import stores
rows, path, place = test_stores.Rows(), pathlib.Path(sys.argv[1]), sys.argv[2]
path.mkdir()
store = stores.create(path, stores.parse(place, path), test_stores.COLUMNS, test_stores.WIDTH)
rows.put(store, slice(0, 100))
print(repr(store.commit()), flush=True)
while True:  # until it is killed
  for start in range(100, 300, 10):
    rows.put(store, slice(start, start + 10))
    print(flush=True)
"""


@pytest.mark.parametrize("lines", [0, 7, 23])
def test_kill(tmp_path, queries, lines):
  """What was committed is there; what was not is not, and can be added again."""
  path = tmp_path / "index"
  environment = os.environ | {"PYTHONPATH": os.getcwd()}
  command = [sys.executable, "-c", WRITE, str(path), place("server", path)]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
  about = eval(process.stdout.readline())
  for _ in range(lines):
    process.stdout.readline()
  process.send_signal(signal.SIGKILL)
  process.wait()
  rows, reader = Rows(), stores.open(path, about, COLUMNS)
  assert reader.nearest(queries, COUNT)[0].shape == (20, 100)
  store = stores.open(path, about, COLUMNS, writing=True)
  rows.put(store, slice(100, COUNT))
  store = stores.open(path, store.commit(), COLUMNS)
  ids, scores = store.nearest(queries, 2 * COUNT)
  assert sorted(ids[0].tolist()) == sorted(rows.ids.tolist())
  np.testing.assert_allclose(scores[0], rows.best(queries[0]), rtol=1e-5)
