"""ScaNN against exact search; on disk without pickle; and its audit."""

import numpy as np
import pytest

from xe_retrieval.evaluation import ranks
from xe_retrieval.search import index_audit
from xe_retrieval.search.stores import files, nearest, scann_index


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_saved_moved_and_loaded(precision, tmp_path):
  vectors, queries = _clusters(3000).astype(precision), _clusters(900, seed=1)
  index = scann_index.build(vectors)
  index.save(tmp_path / "there")
  (tmp_path / "there").rename(tmp_path / "here")
  assert not list((tmp_path / "here").glob("*.pkl"))
  loaded = scann_index.load(tmp_path / "here", vectors)
  assert len(loaded) == 3000
  for one, other in zip(index.search(queries, 5), loaded.search(queries, 5), strict=True):
    np.testing.assert_array_equal(one, other)
  exact = nearest.nearest(vectors, queries, 5)[1]
  np.testing.assert_allclose(loaded.search(queries, 5)[1][:, 0], exact[:, 0], atol=1e-5)


def test_a_tree_finds_the_neighbours(monkeypatch):
  monkeypatch.setattr(scann_index, "TREE_FROM", 2000)
  vectors, queries = _clusters(5000), _clusters(400, seed=1)
  index = scann_index.build(vectors, queries=queries)
  assert index.settings["leaves"] == 142
  assert 10 <= index.settings["leaves_to_search"] <= 142
  exact = nearest.nearest(vectors, queries, 100)[0]
  assert scann_index.overlap(index.search(queries, 10)[0], exact[:, :10]) > 0.95
  # Beyond ten it has to look at more candidates than it returns.
  assert scann_index.overlap(index.search(queries, 100)[0], exact) > 0.9
  # More neighbours than a few leaves hold: the search widens instead of returning holes.
  rows, scores = index.search(queries[:3], 2000)
  assert np.isfinite(scores).all()
  assert len(np.unique(rows[0])) == 2000


def test_settings_follow_the_size():
  assert scann_index.settings(50_000)["leaves"] == 0
  large = scann_index.settings(3_300_000)
  assert large["leaves"] == 3634 and large["soar"]


def test_overlap_by_hand():
  assert scann_index.overlap(np.array([[1, 2], [3, 4]]), np.array([[2, 9], [4, 3]])) == 0.75


def test_refuses_what_is_wrong(tmp_path):
  with pytest.raises(ValueError, match="it has no index.json"):
    scann_index.load(tmp_path, _clusters(100))
  index = scann_index.build(_clusters(100))
  index.save(tmp_path)
  (tmp_path / "scann_docids.pkl").write_bytes(b"")
  with pytest.raises(ValueError, match="a pickle, which may run anything"):
    scann_index.load(tmp_path, _clusters(100))
  with pytest.raises(ValueError, match="asked for 101 neighbours, but the index holds 100"):
    index.search(_clusters(1), 101)


def test_audit_measures_what_the_index_loses(monkeypatch):
  image, more = _clusters(300), _clusters(500, seed=2)
  text = _clusters(300, seed=3) + 2 * image
  found = index_audit.audit(text, image, np.arange(300), more)
  assert found["vectors"] == 800 and found["neighbours_found"]["10"] > 95
  assert found["built"] == "ScaNN, hashes without a tree" and found["settings"]["leaves"] == 0
  exact = ranks.summary(ranks.text_to_image(text, image, np.arange(300), more))
  for name, drift in found["drift"].items():
    np.testing.assert_allclose(found["text_to_image"][name] - drift, exact[name])

  def blind(self, queries, k):  # returns the last rows, whatever is asked
    return np.tile(np.arange(800 - k, 800), (len(queries), 1)), np.zeros((len(queries), k))

  monkeypatch.setattr(scann_index.ScannIndex, "search", blind)
  found = index_audit.audit(text, image, np.arange(300), more)
  assert found["text_to_image"]["recall@1"] == 0 and found["neighbours_found"]["1"] < 10
  assert found["drift"]["recall@1"] == -exact["recall@1"]


def test_audit_says_what_was_built(monkeypatch):
  monkeypatch.setattr(scann_index, "TREE_FROM", 500)
  monkeypatch.setattr(files, "LARGEST", 1000)
  image, text = _clusters(2600), _clusters(300, seed=3)
  found = index_audit.audit(text, image, np.arange(300))
  assert found["built"] == "ScaNN, 3 × a tree of 64 leaves and hashes"
  assert found["neighbours_found"]["10"] > 90
  few = index_audit.audit(text[:9], image[:9], np.arange(9))
  assert few["built"] == "nothing, so few vectors are all compared with"
  assert few["settings"] is None and few["neighbours_found"]["1"] == 100


def _clusters(count, seed=0):
  centres = np.random.default_rng(9).standard_normal((40, 16))
  random = np.random.default_rng(seed)
  x = centres[random.integers(0, 40, count)] + 0.4 * random.standard_normal((count, 16))
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
