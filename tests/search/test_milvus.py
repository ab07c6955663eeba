"""What is particular of Milvus: limits, addresses, whose a collection is, and kills."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from tests.search import test_stores
from tests.search.test_stores import COLUMNS, COUNT, WIDTH, Rows
from xe_retrieval.search import asking, conditions, stores

pytest.importorskip("milvus_lite")
import pymilvus

from xe_retrieval.search.stores import milvus, milvus_client


@pytest.fixture
def store(tmp_path):
  return test_stores.make("milvus", tmp_path / "index")


@pytest.fixture
def queries():
  return np.random.default_rng(1).normal(size=(3, WIDTH)).astype(np.float32)


def test_range_search_grows_until_it_knows(store, queries, monkeypatch):
  """With small pages: what is listed is right, and what cannot be listed is None."""
  rows = Rows()
  rows.put(store)
  store.commit()
  monkeypatch.setattr(milvus, "FIRST", 2)
  monkeypatch.setattr(milvus, "LITE_PAGE", 64)
  best = [rows.best(query) for query in queries]
  for n in (1, 2, 3, 40, 63):
    least = np.array([of[n - 1] for of in best], np.float32) - 1e-6
    found = store.above(queries, least)
    for one, of in zip(found, best, strict=True):
      np.testing.assert_allclose(np.sort(one)[::-1], of[:n], rtol=1e-5)
  least = np.array([of[100] for of in best], np.float32)
  assert store.above(queries, least) == [None] * 3 == store.count(queries, least)


def test_pages_of_a_server(store, queries, monkeypatch):
  """Ceilings, as a server answers them: here by an engine that looks at everything."""
  rows = Rows()
  rows.vectors[:20] = rows.vectors[0]  # equal scores across the border of a page
  rows.put(store)
  store.commit()
  store.lite = False
  monkeypatch.setattr(milvus, "FIRST", 30)
  monkeypatch.setattr(milvus, "PAGE", 30)

  def search(some, k, where, exact=False, radius=-np.inf, range_filter=np.inf):
    out = []
    for query in some:
      scores = rows.vectors @ query
      at = np.argsort(-scores, kind="stable")
      at = at[(scores[at] > radius) & (scores[at] <= range_filter)][:k]
      out.append((rows.ids[at].tolist(), scores[at].tolist()))
    return out

  monkeypatch.setattr(store, "_search", search)
  for least in (1.0, -1.0, -100.0):
    for query, found in zip(queries, store.above(queries, [least] * 3), strict=True):
      expected = rows.best(query)
      np.testing.assert_allclose(np.sort(found)[::-1], expected[expected >= least], rtol=1e-6)
  monkeypatch.setattr(milvus, "PAGE", 10)  # all of a page have one score: no way on
  monkeypatch.setattr(milvus, "FIRST", 10)
  query = rows.vectors[:1] * 10
  assert store.above(query, [-1e9]) == [None]


def test_another_kind_of_index(store, queries, monkeypatch):
  """As a server gets it from EXACT_BELOW on."""
  rows = Rows()
  rows.put(store)
  monkeypatch.setattr(milvus, "EXACT_BELOW", 100)
  assert store.commit()["built"] == "FLAT"
  monkeypatch.setattr(store, "lite", False)
  more = Rows(5, seed=2)
  more.put(store)
  about = store.commit()
  assert about["built"] == "HNSW" and store.approximate and store.histogram(queries, [0]) is None
  ids, scores = store.nearest(queries, 10)
  expected = np.sort(np.append(rows.best(queries[0]), more.best(queries[0])))[::-1]
  np.testing.assert_allclose(scores[0], expected[:10], rtol=1e-4)
  assert store.scan(queries, 3, np.zeros(3))[2] is None
  assert store.scan(queries, 3, np.zeros(3), exact=True)[2] is not None


def test_a_collection_belongs_to_one_index(store, tmp_path):
  uri = tmp_path / "index" / "vectors.db"
  with pytest.raises(ValueError, match="has a collection photos already, which is not that of"):
    second = tmp_path / "second"
    stores.create(second, stores.parse(f"milvus:{uri},photos", second), COLUMNS, WIDTH)
  about = store.commit()
  for wrong, sentence in (
    ({"owner": "somebody"}, "the collection photos of Milvus at vectors.db is not that of this"),
    ({"width": 9}, "has vectors of 8 dimensions, the index says 9"),
    ({"collection": "gone"}, "has no collection gone: if it was dropped, index anew"),
  ):
    with pytest.raises(ValueError, match=sentence):
      stores.open(tmp_path / "index", about | wrong, COLUMNS)
  with pytest.raises(ValueError, match="photos holds vectors of 8 dimensions, not 7"):
    rows = Rows(3)
    rows.vectors = rows.vectors[:, :7]
    rows.put(store)


def test_a_text_that_is_too_long(store):
  rows = Rows(3)
  rows.columns["my tag"] = type(rows.columns["my tag"])
  rows.columns["my tag"] = test_stores.pa.array(["a", "日" * 30_000, None])
  with pytest.raises(ValueError, match="^my tag: '日+'… has more than 65,535 bytes"):
    rows.put(store)


@pytest.mark.parametrize(
  ("uri", "sentence"),
  [
    ("vectors", "neither http://… nor a file of milvus-lite, whose name ends in .db"),
    ("ftp://host/x.db", "neither http://… nor a file"),
    ("http://user:secret@127.0.0.1:1", "has a password in it; MILVUS_TOKEN=user:password"),
    ("http://127.0.0.1:1", "^Milvus at http://127.0.0.1:1: Fail connecting to server"),
  ],
)
def test_wrong_addresses(tmp_path, uri, sentence):
  with pytest.raises(ValueError, match=sentence) as e:
    stores.create(tmp_path, stores.parse(f"milvus:{uri},photos", tmp_path), COLUMNS, WIDTH)
  assert "secret" not in str(e.value) and "\n" not in str(e.value)


def test_what_a_server_says_is_a_sentence():
  """Without the stack of its calls, which comes first."""
  said = "stack trace: /a/trace.go:51 x.Trace\n/b/asm.s:1598 runtime.goexit: attempt #0: too slow"
  uri = "http://host:1"
  with (
    pytest.raises(ValueError, match=f"^Milvus at {uri}: attempt #0: too slow$"),
    milvus_client.asking(uri),
  ):
    raise pymilvus.MilvusException(message=said)


def test_a_package_that_is_missing(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "milvus_lite", None)
  with pytest.raises(ValueError, match=r"pip install 'xe_retrieval\[milvus\]'"):
    stores.create(
      tmp_path, stores.parse(f"milvus:{tmp_path}/x.db,photos", tmp_path), COLUMNS, WIDTH
    )


def test_a_file_inside_the_index_moves_with_it(tmp_path):
  place = milvus_client.place
  assert place(tmp_path / "i", str(tmp_path / "i" / "vectors.db")) == "vectors.db"
  assert place(tmp_path / "i", str(tmp_path / "x.db")) == str(tmp_path / "x.db")
  assert place(tmp_path, "http://host:19530") == "http://host:19530"


def run(code, **more):
  return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, **more)


def test_one_process_at_a_time(store, tmp_path):
  about = store.commit()
  opened = f"stores.open({str(tmp_path / 'index')!r}, {about!r}, {{}})"
  process = run(f"from xe_retrieval.search import stores\n{opened}")
  said = process.communicate(timeout=120)[1]
  assert process.returncode == 1
  assert re.search(r"vectors.db is open in another process, such as serve", said.splitlines()[-1])


def test_a_server(tmp_path, queries, monkeypatch):
  """The same client over a network, with a token: milvus-lite as a server of its own."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  command = ["-m", "milvus_lite", "server", "--data-dir", str(tmp_path / "data")]
  command += ["--host", "127.0.0.1", "--port", str(port)]
  process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)
  try:
    assert process.stdout.readline()  # it listens
    monkeypatch.setenv("MILVUS_TOKEN", "root:very-secret")
    rows, uri = Rows(), f"http://127.0.0.1:{port}"
    store = stores.create(tmp_path, stores.parse(f"milvus:{uri},photos", tmp_path), COLUMNS, WIDTH)
    rows.put(store)
    about = store.commit()
    assert not store.lite and "secret" not in str(about) and about["uri"] == uri
    found = stores.open(tmp_path, about, COLUMNS)
    where = conditions.parse("stars > 100", found.columns)
    assert found.nearest(queries, 5, where)[0].shape == (3, 5) and found.matching(where) == 160
    process.kill()
    process.wait()
    with pytest.raises(ValueError, match=f"^Milvus at {uri}: "):
      found.nearest(queries, 5)
  finally:
    process.kill()
    process.wait()


WRITE = """
import pathlib, sys, pyarrow
from tests.search import test_stores
from xe_retrieval.search import stores
rows, path = test_stores.Rows(), pathlib.Path(sys.argv[1])
store = test_stores.make("milvus", path)
rows.put(store, slice(0, 100))
print(repr(store.commit()), flush=True)
while True:  # until it is killed
  for start in range(100, 300, 10):
    rows.put(store, slice(start, start + 10))
    print(flush=True)
"""


@pytest.mark.parametrize("lines", [0, 17])
def test_kill(tmp_path, queries, lines):
  """What was committed is there; what was not is not, and can be added again."""
  path = tmp_path / "index"
  environment = os.environ | {"PYTHONPATH": os.getcwd()}
  process = subprocess.Popen(
    [sys.executable, "-c", WRITE, str(path)], stdout=subprocess.PIPE, text=True, env=environment
  )
  about = eval(process.stdout.readline())
  for _ in range(lines):
    process.stdout.readline()
  process.send_signal(signal.SIGKILL)
  process.wait()
  rows, start = Rows(), time.perf_counter()
  reader = stores.open(path, about, COLUMNS)
  assert time.perf_counter() - start < 20
  assert reader.nearest(queries, COUNT)[0].shape == (3, 100)
  store = stores.open(path, about, COLUMNS, writing=True)
  rows.put(store, slice(100, COUNT))
  store = stores.open(path, store.commit(), COLUMNS)
  ids, scores = store.nearest(queries, 2 * COUNT)
  assert sorted(ids[0].tolist()) == sorted(rows.ids.tolist())
  np.testing.assert_allclose(scores[0], rows.best(queries[0]), rtol=1e-5)


def test_many_replaced_images(store):
  """Each addition takes time by its own size, whatever the number of those that are to come."""
  rows = Rows(20)
  store.remove(np.arange(5_000_000, dtype=np.uint64))
  store.remove(rows.ids)
  start = time.process_time()
  for i in range(20):
    rows.put(store, slice(i, i + 1))
  assert time.process_time() - start < 5
  store._gone = store._gone[store._back]  # of the 5 million, none was ever there
  store._back = store._back[store._back]
  assert store.commit()["images"] == 20


def test_a_short_answer_cuts_no_other(store, queries, monkeypatch):
  """An approximate index may find less for one query of several."""
  rows = Rows()
  rows.put(store)
  store.commit()
  whole, ids = store.nearest(queries, 10)[1], store.nearest(queries, 10)[0]
  search = store._search

  def short(some, k, where, exact=False, **more):
    return [(i[:4], s[:4]) if q == 1 else (i, s) for q, (i, s) in enumerate(search(some, k, where))]

  monkeypatch.setattr(store, "_search", short)
  found, scores = store.nearest(queries, 10)
  for q in (0, 2):
    np.testing.assert_array_equal(found[q], ids[q])
    np.testing.assert_array_equal(scores[q], whole[q])
  np.testing.assert_array_equal(scores[1], [*whole[1, :4], *[-np.inf] * 6])
  asked = types.SimpleNamespace(
    query=None, without=None, order="best", offset=0, top=10, near=2, like=None, levels=False
  )
  searcher = types.SimpleNamespace(probabilities=lambda query, scores: [None] * len(scores))
  answer = asking._found(searcher, asked, -100.0, found[1], scores[1], None)
  assert answer.ids.tolist() == ids[1, :4].tolist() and answer.results == 4


def test_all_images_are_counted_and_not_listed(store, queries, monkeypatch):
  """Where a threshold passes everything, as it does for a picture alone."""
  rows = Rows()
  rows.put(store)
  store.commit()
  monkeypatch.setattr(store, "_range", None)  # fails if it is called
  for where, mask in ((None, np.ones(COUNT, bool)), ("stars > 1", rows.columns["stars"])):
    if where:
      mask = np.array([x is not None and x > 1 for x in mask.to_pylist()])
      where = conditions.parse(where, store.columns)
    monkeypatch.setattr(milvus, "FIRST", 20)
    for exact in (False, True):
      ids, scores, found = store.scan(queries, 5, np.full(3, -1e6), where, exact)
      assert [len(of) for of in found] == [mask.sum()] * 3 and ids.shape == (3, 5)
      for query, of in zip(queries, found, strict=True):
        np.testing.assert_allclose(of[:20], rows.best(query, mask)[:20], rtol=1e-5)
  for listed in (False, True):
    with pytest.raises(TypeError):
      store.scan(queries, 5, np.full(3, -1e6 * listed), listed=listed)


def test_a_picture_with_levels_is_counted_and_not_listed():
  """It has no probabilities, by which levels would be told."""
  asked = []

  def scan(vectors, depth, least, where, exact, listed):
    asked.append((exact, listed))
    ids = np.arange(depth, dtype=np.uint64)[None].repeat(len(vectors), 0)
    return ids, np.zeros(ids.shape), [np.zeros(7)] * len(vectors)

  vectors = lambda ids: np.zeros((len(ids), 2), np.float32)  # noqa: E731
  store = types.SimpleNamespace(scan=scan, vectors=vectors)
  searcher = types.SimpleNamespace(
    collection=types.SimpleNamespace(store=store),
    threshold=lambda query, cut: -1.0,
    score_at=lambda query, p: -0.5,
    probabilities=lambda query, scores: [None if query is None else 0.5] * len(scores),
  )
  vector, known = np.zeros(2, np.float32), object()
  words = asking.Query("a dog", vector, known, False, True, [])
  for ask in (
    asking.Ask(None, None, top=2, levels=True, like=vector),
    asking.Ask(words, None, top=2, levels=True),
    asking.Ask(words, None, top=2),
  ):
    [found] = asking.answer(searcher, [ask])
    assert found.total == 7
  assert asked == [(True, False), (True, True), (False, False)]
