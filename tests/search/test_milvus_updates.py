"""Runs of `index` over Milvus that were killed between what Milvus did and the manifest."""

import numpy as np
import pytest

from tests.search.conftest import KINDS, place, release
from tests.search.test_update import names, update  # noqa: F401
from xe_retrieval.search import generation
from xe_retrieval.search.collection import Collection
from xe_retrieval.search.stores import milvus
from xe_retrieval.search.stores.store import Unavailable

pytest.importorskip("milvus_lite")


@pytest.fixture(params=KINDS[1:])
def store(request, tmp_path):
  yield place(request.param, tmp_path / "index")
  release(tmp_path / "index")


class Killed(Exception):
  pass


def kill(*_):
  raise Killed


def test_killed_before_the_manifest(update, photos, tmp_path, monkeypatch):  # noqa: F811
  """After an update that has only removed: the next one says so, and readers do not fail."""
  update([photos])
  reader = Collection(tmp_path / "index")
  ids = reader.store.known("photos")[0]
  (photos / "scene001.png").unlink()
  with monkeypatch.context() as patch:
    patch.setattr(generation, "write_manifest", kill)
    with pytest.raises(Killed):
      update([photos])
  for ask in (
    lambda: reader.store.fetch(ids, ("name", "source")),
    lambda: reader.store.vectors(ids),
  ):
    with pytest.raises(Unavailable, match=" is being updated, .*: ask again"):
      ask()
  report = update([photos])
  found = Collection(tmp_path / "index")
  assert report.changed and report.images == 29
  assert found.manifest["images"] == len(found.store) == found.store.matching(None) == 29
  assert found.manifest["summary"]["folders"][0] == {"folder": "photos", "images": 29}
  assert not update([photos]).changed


def test_killed_while_an_index_is_built(update, photos, tmp_path, monkeypatch):  # noqa: F811
  update([photos])
  store = Collection(tmp_path / "index").store
  name = store._about["collection"]
  store.client.release_collection(name)
  store.client.drop_index(name, "vector")
  query = np.ones((1, store.width), np.float32)
  assert Collection(tmp_path / "index").store.nearest(query, 3)[0].shape == (1, 3)
  # The new one is there, and the manifest says FLAT.
  milvus.milvus_client.build(store.client, name, "HNSW")
  reader = Collection(tmp_path / "index").store
  assert reader.approximate and reader.histogram(query, [0]) is None
  assert update([photos]).changed and not update([photos]).changed
  assert not Collection(tmp_path / "index").store.approximate


def test_a_collection_that_was_dropped(update, photos, tmp_path):  # noqa: F811
  """--rebuild makes it anew, and drops no collection of somebody else."""
  update([photos])
  store = Collection(tmp_path / "index").store
  client, name = store.client, store._about["collection"]
  client.drop_collection(name)
  with pytest.raises(ValueError, match=f"no collection {name}: .* index anew with --rebuild"):
    update([photos])
  client.create_collection(name, 8)
  with pytest.raises(ValueError, match=f"{name} of Milvus at .* is not that of this index"):
    update([photos])
  assert update([photos], rebuild=True).images == len(names(tmp_path)) == 30
  assert client.has_collection(name)
