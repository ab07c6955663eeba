"""Checkpoints survive damage, full disks, changed configs and NaNs."""

import json
import re
import resource
import sys

import chex
import jax
import numpy as np
import pytest

from benchmarks import damage as damages
from xe_retrieval import config as config_lib
from xe_retrieval import main
from xe_retrieval import model as models
from xe_retrieval.data import mesh
from xe_retrieval.training import checkpoint_reader, checkpoints, step
from xe_retrieval.training.checkpoints import Checkpoints

ONE = jax.devices()[:1]


def run(config, workdir, **kwargs):
  return jax.device_get(main.train(config, workdir, ONE, **kwargs))


def saved(workdir):
  return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())


def at(n, finished):
  """The finished state as if it were that of step n."""
  return jax.device_put(finished[1].replace(step=np.int32(n)), ONE[0])


def largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.fixture
def damage(request):
  def flip(folder):
    file = largest(folder / "model")
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), 50):  # many, as some bytes of the file are unused
      data[place] ^= 1
    file.write_bytes(data)

  def cut(folder):
    file = largest(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

  def lose(folder):
    (folder / "training" / "_METADATA").unlink()

  def garble(folder):
    (folder / "metrics" / "metrics").write_bytes(b'{"pr_auc"\xff 1}')

  def improve(folder):  # valid JSON, by which another checkpoint would be the best
    (folder / "metrics" / "metrics").write_text('{"pr_auc": 99.5}')

  def rename(folder):  # valid JSON, by which Orbax looks for other files
    file = folder / "training" / "_METADATA"
    file.write_text(file.read_text().replace("use_ocdbt", "use_ocdbu"))

  changes = (flip, cut, lose, garble, improve, rename)
  return {change.__name__: change for change in changes}[request.param]


@pytest.mark.parametrize("damage", ["flip", "cut", "garble", "improve", "rename"], indirect=True)
def test_a_damaged_checkpoint_is_reported_and_training_resumes_from_the_previous_one(
  config, finished, workdir, damage, capsys
):
  damage(workdir / "checkpoints" / "4")
  state = run(config, workdir)
  printed = capsys.readouterr().out
  assert re.search("WARNING: .*checkpoint 4 .* (is|are) damaged", printed)
  assert "resuming after step 2" in printed
  chex.assert_trees_all_equal(state, finished[1])
  assert saved(workdir) == [2, 4] and (workdir / "damaged" / "4").exists()


@pytest.mark.parametrize("damage", ["lose"], indirect=True)
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(config, workdir, damage):
  """A mount that is stale or a network that is down looks the same."""
  damage(workdir / "checkpoints" / "4")
  with pytest.raises(
    OSError, match=r"checkpoint 4 .* cannot be read .* Nothing was moved.* remove"
  ):
    run(config, workdir)
  assert saved(workdir) == [2, 4] and not (workdir / "damaged").exists()


def test_a_changed_byte_anywhere_is_damage_or_does_not_matter(finished, workdir):
  """benchmarks/damage.py changes more."""
  config = config_lib.from_json((workdir / "config.json").read_text())
  like = step.build(config, mesh.make(ONE)).state
  found = damages.outcomes(workdir, 4, like, finished[1], changes=40, seed=0)
  outcomes = [(file, change, outcome) for file, change, outcome in found]
  assert [x for x in outcomes if not damages.right(x[2])] == []
  # About a third: which files are hit depends on their names, and these are random.
  assert sum("damaged" in outcome for _, _, outcome in outcomes) > 3


def test_evaluation_refuses_a_damaged_model(workdir):
  file = largest(workdir / "checkpoints" / "4" / "model")
  file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
  with pytest.raises(ValueError, match=r"^checkpoint 4 of .* is damaged \("):
    models.restore(workdir, "latest")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("503 Service Unavailable")])
def test_an_error_of_the_machine_moves_no_checkpoint(config, workdir, monkeypatch, error):
  def restore(*_, **__):
    raise error

  monkeypatch.setattr(checkpoints.ocp.CheckpointManager, "restore", restore)
  with pytest.raises(OSError, match=rf"cannot be read \({str(error) or 'MemoryError'}\)"):
    run(config, workdir)
  assert saved(workdir) == [2, 4]


def test_a_changed_config_needs_a_flag_and_changed_shapes_are_refused(config, tmp_path, capsys):
  config.ema_decay = 0.9
  before = run(config, tmp_path)
  chex.assert_trees_all_equal(
    jax.device_get(models.restore(tmp_path, "latest").variables), before.ema
  )
  config.steps, config.scale = 6, 10.0
  with pytest.raises(ValueError, match=r"--allow_config_change:\n  config\.scale: 20\.0 → 10\.0"):
    run(config, tmp_path)
  assert run(config, tmp_path, allow_config_change=True).step == 6
  assert "changed: config.scale: 20.0 → 10.0" in capsys.readouterr().out
  assert json.loads((tmp_path / "config.json").read_text())["scale"] == 10.0
  config.embedding_dim = 4
  with pytest.raises(ValueError, match=r"checkpoint 6 .* \[16, 8\] there and \[16, 4\]"):
    run(config, tmp_path, allow_config_change=True)
  assert saved(tmp_path) == [2, 4, 6]  # none was taken for damaged


def test_the_best_every_fourth_and_the_last_two_are_kept(finished, tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4)
  for n in range(1, 9):
    metrics = {"pr_auc": [9.0, 5.0][n % 2]} if n in (2, 3, 5) else None
    checkpoints.save(at(n, finished), metrics, "{}")
  assert checkpoints.best() == 2
  checkpoints.close()
  assert saved(tmp_path) == [2, 4, 7, 8]
  notes = json.loads((tmp_path / "checkpoints" / "8" / "run" / "metadata").read_text())
  assert notes["position"] == 8 and notes["best"] == {"step": 2, "pr_auc": 9.0}
  # Evaluation during training must not remove a checkpoint that is being written.
  partial = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
  partial.mkdir()
  Checkpoints(tmp_path, read_only=True).close()
  assert partial.exists()


def test_a_full_disk_is_reported_and_the_next_save_succeeds(
  finished, tmp_path, capsys, monkeypatch
):
  tracebacks = []
  monkeypatch.setattr(sys, "unraisablehook", tracebacks.append)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(at(1, finished))
  checkpoints._settle()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # bytes per file
  try:
    checkpoints.save(at(2, finished))
    checkpoints._settle()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  printed = capsys.readouterr().out
  assert "could not be saved" in printed and "the last good one is step 1" in printed
  assert saved(tmp_path) == [1] and not tracebacks  # of TensorStore's threads
  checkpoints.save(at(3, finished))
  checkpoints.close()
  assert saved(tmp_path) == [1, 3]


def test_training_stops_at_a_nan_before_it_is_saved(config, tmp_path):
  config.steps, config.checkpoint_every, config.log_every = 40, 1, 10
  config.eval_every, config.keep_checkpoints = 40, 50
  config.image.optimizer, config.image.batch_norm = "sgd", "frozen"
  config.image.learning_rate = config.image.end_learning_rate = 1e20
  pattern = r"step (\d+) is not finite.*learning rates text .* image 1e\+20; image ids of its batch"
  with pytest.raises(FloatingPointError, match=pattern) as error:
    run(config, tmp_path)
  n = int(str(error.value).split()[1])
  report = json.loads((tmp_path / f"not_finite_{n}.json").read_text())
  assert len(report["image_ids"]) == config.batch_size
  assert saved(tmp_path) == list(range(1, n))
  for x in jax.tree.leaves(models.restore(tmp_path, "latest").variables):
    assert np.isfinite(x).all()


def test_a_workdir_that_cannot_be_written(config):
  with pytest.raises(ValueError, match="the workdir /proc/runs cannot be written"):
    run(config, "/proc/runs")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_checksum_depends_on_every_bit_but_not_on_the_sharding(dtype):
  x = np.random.default_rng(0).standard_normal((8, 24, 3)).astype(jax.numpy.dtype(dtype))
  whole = checkpoint_reader._checksum(x)
  four = mesh.make(jax.devices()[:4])
  for spec in ((), ("data",), (None, "data")):
    sharding = jax.sharding.NamedSharding(four, jax.sharding.PartitionSpec(*spec))
    assert checkpoint_reader._checksum(jax.device_put(x, sharding)) == whole
  for byte in range(0, x.nbytes, 7):
    x.view(np.uint8).reshape(-1)[byte] ^= 1
    assert checkpoint_reader._checksum(x) != whole
    x.view(np.uint8).reshape(-1)[byte] ^= 1
