"""Train, evaluate and index over two processes: what one does, to the bit where it can be."""

import json
import shutil

import chex
import jax
import numpy as np
import pytest

from tests import evaluate_and_index
from tests.training.test_processes import launch, losses
from xe_retrieval import config as config_lib
from xe_retrieval import main, model
from xe_retrieval.data import mesh
from xe_retrieval.evaluation import score_tiles
from xe_retrieval.search.collection import Collection
from xe_retrieval.training import features, processes, step
from xe_retrieval.training.checkpoints import Checkpoints

TWO = """
import pathlib, sys
from tests import evaluate_and_index
from xe_retrieval import config, main
from xe_retrieval.training import processes

root = pathlib.Path(sys.argv[1])
with processes.together():
  main.train(config.from_json((root / "config.json").read_text()), root / "two")
  evaluate_and_index.run(root / "two", root / "by_two")
"""


@pytest.fixture
def restored(monkeypatch):
  """What evaluate_and_index changes is put back afterwards."""
  changed = ((model, "BATCH"), (features, "BATCH"), (processes, "SHARD"))
  for module, name in (*changed, (score_tiles, "QUERIES"), (score_tiles, "DOCUMENTS")):
    monkeypatch.setattr(module, name, getattr(module, name))
  defaults = model.Encoder.__init__.__defaults__
  yield
  model.Encoder.__init__.__defaults__ = defaults


@pytest.mark.slow
def test_two_processes_with_two_devices_do_what_one_does(config, tmp_path, restored, monkeypatch):
  """With a sharded state, micro-batches, the features of a frozen tower, and a bank."""
  config.log_every, config.text.mlp, config.image.freeze = 1, 64, "all"
  config.data.dir = str(tmp_path / "data")  # prepared by process 0 while the other waits
  config.mesh.shard_parameters, config.micro_batch = True, 8
  # AdamW would turn rounding errors of a zero gradient (keys' biases) into full steps.
  config.text.optimizer, config.text.learning_rate = "sgd", 0.02
  config.bank.update({"query": 0.5, "image": 0.25, "familiarity": 0.5, "size": 20})
  (tmp_path / "config.json").write_text(config_lib.to_json(config))
  printed = launch("-c", TWO, str(tmp_path), timeout=600)
  assert "on 4 cpu device(s) of 2 processes" in printed
  assert printed.count("validation PR-AUC") == 2  # only process 0 prints

  config.bank.update({"query": 0.0, "image": 0.0, "familiarity": 0.0})  # it is made afterwards
  one = main.train(config, tmp_path / "one", jax.devices()[:4])
  np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-6)
  trained = config_lib.from_json((tmp_path / "two" / "config.json").read_text())
  like = step.build(trained, mesh.make(jax.devices()[:4])).state
  two = Checkpoints(tmp_path / "two", read_only=True).restore(config.steps, like)
  # Two processes add their gradients in another order than four devices of one.
  chex.assert_trees_all_close(jax.device_get(two), jax.device_get(one), rtol=1e-5, atol=1e-5)

  by_two = written(tmp_path / "two", tmp_path / "by_two")
  for file in ("calibration.json", "bank.npz"):
    (tmp_path / "two" / file).unlink()
  shutil.rmtree(tmp_path / "data" / "features")
  # As many as each of the two had: rows of one size are computed alike.
  monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:2])
  evaluate_and_index.run(tmp_path / "two", tmp_path / "by_one")
  by_one = written(tmp_path / "two", tmp_path / "by_one")
  assert_same_up_to_rounding(by_two[:2], by_one[:2])
  dim = config.embedding_dim  # after it stands what the bank takes off
  np.testing.assert_array_equal(by_two[2][:, :dim], by_one[2][:, :dim])
  np.testing.assert_allclose(by_two[2], by_one[2], rtol=1e-6, atol=1e-7)


def assert_same_up_to_rounding(found, expected):
  """Counts to the bit; BLAS may round products of a share of the queries in another way."""
  found, expected = map(jax.tree_util.tree_leaves_with_path, (found, expected))
  assert len(found) == len(expected) > 100
  for (path, x), (place, y) in zip(found, expected, strict=True):
    assert path == place and type(x) is type(y)
    assert x == (pytest.approx(y, rel=1e-6, abs=1e-9) if isinstance(y, float) else y), path


def written(workdir, out):
  """-> metrics.json, calibration.json, the vectors of the index."""
  assert sorted(p.name for p in out.iterdir()) == ["index", "test"]  # no shards are left
  assert not (out / "index" / "partial").exists()
  index = Collection(out / "index")
  ids = np.concatenate([index.store.known(label)[0] for label in sorted(index.sources)])
  return (
    json.loads((out / "test" / "metrics.json").read_text()),
    json.loads((workdir / "calibration.json").read_text()),
    index.store.vectors(ids),
  )
