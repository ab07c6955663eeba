"""The loop: reproducible, the same on any number of devices, stopped and resumed bit for bit."""

import json
import os
import re
import signal
import threading
import time

import chex
import jax
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2

from xe_retrieval import train
from xe_retrieval.data import pipeline
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.retrieval import embed, metrics
from xe_retrieval.training import build, dry_run, mesh

ONE = jax.devices()[:1]


def run(config, workdir, devices=None):
  return jax.device_get(train.train(config, workdir, devices))


def test_one_seed_gives_the_same_bytes_twice(config, tmp_path):
  first, second = run(config, tmp_path / "a", ONE), run(config, tmp_path / "b", ONE)
  chex.assert_trees_all_equal(first, second)


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_eight_devices_agree_with_one(config, tmp_path, implementation):
  config.steps, config.log_every, config.eval_every = 3, 10, 10
  one = run(config, tmp_path / "one", ONE)
  config.loss_implementation = implementation
  eight = run(config, tmp_path / "eight")
  chex.assert_trees_all_close(one.params, eight.params, atol=1e-5)
  chex.assert_trees_all_close(one.batch_stats, eight.batch_stats, atol=1e-5)


def test_interrupted_and_resumed_ends_with_the_same_bytes(config, tmp_path):
  """Twice, by SIGINT and by SIGTERM, with dropout, micro-batches and a mean of the parameters."""
  config.steps, config.log_every, config.eval_every, config.checkpoint_every = 60, 1, 60, 60
  config.text.dropout, config.micro_batch, config.ema_decay = 0.1, 8, 0.9
  whole = run(config, tmp_path / "whole", ONE)
  path, before = tmp_path / "cut" / "metrics.jsonl", 0
  for number in (signal.SIGINT, signal.SIGTERM):
    _interrupt_after(number, path, before + 3)
    stopped = run(config, tmp_path / "cut", ONE)
    assert before + 3 <= stopped.step < 60
    before = int(stopped.step)
  path.write_text(path.read_text() + json.dumps({"step": before + 1, "loss": 9}) + '\n{"step": 3')
  resumed = run(config, tmp_path / "cut", ONE)  # after a kill the last lines are of lost steps
  chex.assert_trees_all_equal(resumed, whole)
  lines = [json.loads(line) for line in path.open()]
  assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61))
  trained = [line["loss"] for line in lines if "loss" in line]
  told = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
  assert trained == [line["loss"] for line in told if "loss" in line]


def _interrupt_after(number, path, lines):
  def wait():
    while not path.exists() or len(path.read_text().splitlines()) < lines:
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  threading.Thread(target=wait).start()


def test_what_is_logged_and_profiled(config, tmp_path):
  config.profile_steps = "2:3"
  run(config, tmp_path, ONE)
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
  names = {name for line in lines for name in line}
  assert names >= {
    "loss", "learning_rate/text", "learning_rate/image", "gradient_norm/text",
    "gradient_norm/image", "score/positive_p50", "score/negative_p95", "data_wait_share",
    "pairs_per_second", "validation/pr_auc", "validation/recall@1",
  }  # fmt: skip
  (events,) = (tmp_path / "tensorboard").iterdir()
  board = {
    value.tag
    for record in tf.data.TFRecordDataset(str(events)).as_numpy_iterator()
    for value in event_pb2.Event.FromString(record).summary.value
  }
  assert board == names - {"step"}
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_dry_run_says_what_would_be_trained(config, tmp_path):
  config.text.freeze = "all"
  where = mesh.make(ONE)
  prepared, source, *_ = train.prepare(config, where)
  told = dry_run.describe(prepared, tmp_path, source, where)
  assert "64 images, 4 batches of 16 per epoch, 4 steps = 1.0 epochs" in told
  built = build.build(prepared, where)
  count = sum(x.size for x in jax.tree.leaves(built.state.params["image"]))
  assert f"{count:,} parameters: {count:,} learn by adamw" in told
  assert "128 learn by adamw" in told  # the projection of a frozen text tower, 16 x 8
  assert float(re.search(r"device\(s\): ([\d.]+) MiB", told)[1]) > 0.05
  assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")
  assert [p.name for p in tmp_path.iterdir()] == ["schedules.png"]


def test_a_changed_config_is_refused_and_named(config, tmp_path):
  run(config, tmp_path, ONE)
  config.scale = 10.0
  with pytest.raises(ValueError, match=r"config\.scale: 20\.0 → 10\.0"):
    run(config, tmp_path, ONE)


def test_a_restored_model_embeds_as_the_trained_one(config, tmp_path):
  state = run(config, tmp_path, ONE)
  encoder = embed.restore(tmp_path, "latest")
  assert encoder.step == config.steps
  chex.assert_trees_all_equal(jax.device_get(encoder.variables["params"]), state.params)
  source = pipeline.Source(config.data.name, config.data.dir, "validation")
  pairs = embed.embed(encoder, source)
  assert len(pairs.captions) == len(source) == len(pairs.text)
  np.testing.assert_allclose(np.linalg.norm(pairs.image, axis=1), 1, rtol=1e-5)
  assert pairs.relevant(np.arange(20))[np.arange(20), pairs.image_of_text[:20]].all()
  logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
  logged = [m for m in logged if "validation/pr_auc" in m][-1]
  np.testing.assert_allclose(
    metrics.headline(pairs)["pr_auc"], logged["validation/pr_auc"], rtol=1e-3
  )


def test_no_workdir_no_model(tmp_path):
  with pytest.raises(ValueError, match="config.json"):
    embed.restore(tmp_path)
