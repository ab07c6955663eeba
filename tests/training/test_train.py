"""The loop: reproducible, the same on any number of devices, stopped and resumed bit for bit."""

import json
import os
import signal
import threading
import time

import chex
import jax
import numpy as np
import pytest

from xe_retrieval import train
from xe_retrieval.data import pipeline
from xe_retrieval.retrieval import embed, metrics

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
  config.steps, config.log_every, config.eval_every, config.checkpoint_every = 60, 1, 60, 60
  whole = run(config, tmp_path / "whole", ONE)
  threading.Thread(target=_interrupt_after, args=(tmp_path / "cut" / "metrics.jsonl", 3)).start()
  stopped = run(config, tmp_path / "cut", ONE)
  assert 3 <= stopped.step < 60
  resumed = run(config, tmp_path / "cut", ONE)
  chex.assert_trees_all_equal(resumed, whole)
  steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").open()]
  assert sorted(set(steps)) == list(range(1, 61))


def _interrupt_after(path, lines):
  while not path.exists() or len(path.read_text().splitlines()) < lines:
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGINT)


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
