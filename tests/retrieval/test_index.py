"""The index: exact against a sort; ScaNN against exact; on disk without pickle; and its audit."""

import numpy as np
import pytest

from xe_retrieval.retrieval import audit, tiles
from xe_retrieval.retrieval import index as indexes


def test_exact_equals_sort(monkeypatch):
  monkeypatch.setattr(tiles, "DOCUMENTS", 130)
  vectors, queries = _clusters(700), _clusters(50, seed=1)
  rows, scores = indexes.build(vectors).search_rows(queries, 9)
  expected = np.argsort(-(queries @ vectors.T), axis=1)[:, :9]
  np.testing.assert_array_equal(rows, expected)
  np.testing.assert_allclose(
    scores, np.take_along_axis(queries @ vectors.T, expected, 1), rtol=1e-6
  )


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_saved_moved_loaded_and_added_to(kind, tmp_path):
  vectors, more, queries = _clusters(3000), _clusters(40, seed=2), _clusters(30, seed=1)
  names = np.array([f"photo {i}.jpg" for i in range(3000)])
  index = indexes.build(vectors, names, kind=kind)
  index.save(tmp_path / "there")
  (tmp_path / "there").rename(tmp_path / "here")
  assert not list((tmp_path / "here").glob("*.pkl"))
  loaded = indexes.load(tmp_path / "here")
  for one, other in zip(index.search(queries, 5), loaded.search(queries, 5), strict=True):
    np.testing.assert_array_equal(one, other)

  loaded.add(more, [f"new {i}.jpg" for i in range(40)])
  loaded.save(tmp_path / "grown")
  for grown in (loaded, indexes.load(tmp_path / "grown")):
    assert len(grown) == 3040
    ids, scores = grown.search(more, 1)
    assert (ids[:, 0] == [f"new {i}.jpg" for i in range(40)]).mean() > 0.95
    np.testing.assert_allclose(scores.max(), 1, atol=1e-5)


def test_scann_with_a_tree_finds_the_neighbours(monkeypatch):
  monkeypatch.setattr(indexes, "TREE_FROM", 2000)
  vectors, queries = _clusters(5000), _clusters(400, seed=1)
  index = indexes.build(vectors, kind="scann", queries=queries)
  assert index.settings["leaves"] == 284
  assert 10 <= index.settings["leaves_to_search"] <= 284
  exact = indexes.build(vectors, kind="exact")
  found = indexes.overlap(index.search_rows(queries, 10)[0], exact.search_rows(queries, 10)[0])
  assert found > 0.95
  # Beyond ten it has to look at more candidates than it returns.
  found = indexes.overlap(index.search_rows(queries, 100)[0], exact.search_rows(queries, 100)[0])
  assert found > 0.9
  # More neighbours than a few leaves hold: the search widens instead of returning holes.
  rows, scores = index.search_rows(queries[:3], 2000)
  assert np.isfinite(scores).all()
  assert len(np.unique(rows[0])) == 2000


def test_settings_follow_the_size():
  assert indexes.build(_clusters(100)).kind == "exact"
  assert indexes.settings(50_000)["leaves"] == 0
  large = indexes.settings(3_300_000)
  assert large["leaves"] == 7268 and large["soar"]


def test_overlap_by_hand():
  assert indexes.overlap(np.array([[1, 2], [3, 4]]), np.array([[2, 9], [4, 3]])) == 0.75


def test_refuses_what_is_wrong(tmp_path):
  with pytest.raises(ValueError, match="it has no index.json"):
    indexes.load(tmp_path)
  index = indexes.build(_clusters(100))
  index.save(tmp_path)
  (tmp_path / "scann_docids.pkl").write_bytes(b"")
  with pytest.raises(ValueError, match="a pickle, which may run anything"):
    indexes.load(tmp_path)
  with pytest.raises(ValueError, match="ids must be new"):
    index.add(_clusters(2), [99, 100])
  with pytest.raises(ValueError, match="asked for 101 neighbours, but the index holds 100"):
    index.search(_clusters(1), 101)
  with pytest.raises(ValueError, match="ids must be distinct"):
    indexes.build(_clusters(2), ["a", "a"])


def test_audit_of_an_exact_index_finds_no_drift():
  image, more = _clusters(300), _clusters(500, seed=2)
  text = _clusters(300, seed=3) + 2 * image
  found = audit.audit(text, image, np.arange(300), more)
  assert found["vectors"] == 800
  assert found["neighbours_found"] == {"1": 100, "5": 100, "10": 100, "100": 100}
  assert set(found["drift"].values()) == {0.0}


def _clusters(count, seed=0):
  centres = np.random.default_rng(9).standard_normal((40, 16))
  random = np.random.default_rng(seed)
  x = centres[random.integers(0, 40, count)] + 0.4 * random.standard_normal((count, 16))
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
