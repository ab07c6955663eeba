"""The loop: reproducible, the same on any number of devices, bit-identical after a resume."""

import gc
import json
import os
import re
import shutil
import signal
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2

from tests.conftest import ROOT
from xe_retrieval import main
from xe_retrieval import model as models
from xe_retrieval.data import mesh, pipeline, tokenization
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.evaluation import embedded, figures
from xe_retrieval.training import dry_run, loop, step

ONE = jax.devices()[:1]


def run(config, workdir, devices=None):
  return jax.device_get(main.train(config, workdir, devices))


def test_two_runs_with_one_seed_are_bit_identical(config, finished, tmp_path):
  chex.assert_trees_all_equal(run(config, tmp_path, ONE), finished[1])


@pytest.mark.parametrize("implementation", ["dense", "streaming"])
def test_eight_devices_agree_with_one(config, finished, tmp_path, implementation):
  config.loss_implementation = implementation
  one, eight = finished[1], run(config, tmp_path)
  chex.assert_trees_all_close(one.params, eight.params, atol=1e-5)
  chex.assert_trees_all_close(one.batch_stats, eight.batch_stats, atol=1e-5)


def test_an_interrupted_and_resumed_run_is_bit_identical(config, tmp_path):
  """By SIGINT and by SIGTERM; with dropout, micro-batches and a moving average."""
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
  resumed = run(config, tmp_path / "cut", ONE)  # as after a kill, with lines of lost steps
  chex.assert_trees_all_equal(resumed, whole)
  lines = [json.loads(line) for line in path.open()]
  assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61))
  trained = [line["loss"] for line in lines if "loss" in line]
  expected = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
  assert trained == [line["loss"] for line in expected if "loss" in line]


def _interrupt_after(number, path, lines):
  def wait():
    while not path.exists() or len(path.read_text().splitlines()) < lines:
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  threading.Thread(target=wait).start()


def test_logs_and_profile(config, tmp_path):
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


def test_a_dry_run_prints_sizes_memory_and_schedules(config, tmp_path):
  config.text.freeze = "all"
  where = mesh.make(ONE)
  prepared, source, *_ = loop.prepare(config, where)
  printed = dry_run.describe(prepared, tmp_path, source, where)
  assert "64 images, 4 batches of 16 per epoch, 4 steps = 1.0 epochs" in printed
  built = step.build(prepared, where)
  count = sum(x.size for x in jax.tree.leaves(built.state.params["image"]))
  assert f"{count:,} parameters: {count:,} learn by adamw" in printed
  assert "128 learn by adamw" in printed  # the projection of a frozen text tower, 16 x 8
  assert float(re.search(r"device\(s\): ([\d.]+) MiB", printed)[1]) > 0.05
  assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")
  assert [p.name for p in tmp_path.iterdir()] == ["schedules.png"]


def test_a_restored_model_embeds_like_the_trained_one(config, finished):
  workdir, state = finished
  encoder = models.restore(workdir, "latest")
  assert encoder.step == config.steps
  chex.assert_trees_all_equal(jax.device_get(encoder.variables["params"]), state.params)
  source = pipeline.Source(config.data.name, config.data.dir, "validation")
  pairs = embedded.embed(encoder, source)
  assert len(pairs.captions) == len(source) == len(pairs.text)
  np.testing.assert_allclose(np.linalg.norm(pairs.image, axis=1), 1, rtol=1e-5)
  for caption, image in zip(pairs.captions, pairs.image_of_text, strict=True):
    assert caption in pairs.images.captions[image]
  logged = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
  logged = [m for m in logged if "validation/pr_auc" in m][-1]
  np.testing.assert_allclose(
    figures.headline(pairs)["pr_auc"], logged["validation/pr_auc"], rtol=1e-3
  )


def test_validation_keeps_no_weights_on_the_devices(config, finished):
  """With a sharded state, a replica of all weights would stay on every device."""
  encoder = models.restore(finished[0], "latest")
  source = pipeline.Source(config.data.name, config.data.dir, "validation")
  validate = figures.validation(encoder.config, encoder.model, encoder.tokenizer, source, {}, ONE)
  variables = jax.tree.map(jnp.array, jax.device_get(encoder.variables))
  gc.collect()
  before = len(jax.live_arrays())
  assert validate(variables)["queries"] == len(source)
  gc.collect()
  assert len(jax.live_arrays()) - before < len(jax.tree.leaves(variables))


def test_a_directory_without_a_run_is_refused(tmp_path):
  with pytest.raises(ValueError, match="config.json"):
    models.restore(tmp_path)


@pytest.mark.parametrize("freeze", ["none", "all"])
def test_a_resumed_run_needs_no_pretrained_weights(config, tmp_path, freeze):
  bert = shutil.copytree(ROOT / "tests" / "towers" / "references" / "bert", tmp_path / "bert")
  tokenization.train(["a red circle"], 40, 8).save(bert)
  config.text.pretrained, config.text.freeze, config.text.tokens = str(bert), freeze, 8
  config.data.dir = str(tmp_path)
  done = run(config, tmp_path / "run", ONE)
  cached = sorted((tmp_path / "features").glob("*")) if freeze == "all" else []
  shutil.rmtree(bert)
  chex.assert_trees_all_equal(run(config, tmp_path / "run", ONE), done)
  assert len(cached) == (2 if freeze == "all" else 0)
  assert cached == sorted((tmp_path / "features").glob("*"))  # the same keys
  unknown = pytest.raises(ValueError, match="neither a path on this machine nor a Hugging Face id")
  with unknown:
    run(config, tmp_path / "another", ONE)
  towers = tmp_path / "run" / "towers.json"
  for wrong in ("{", "\N{REPLACEMENT CHARACTER}", "{}"):  # as if it were not there
    towers.write_text(wrong)
    with unknown:
      run(config, tmp_path / "run", ONE)


def test_what_a_run_knows_of_its_towers_is_checked_and_read_in_a_sentence(config, tmp_path):
  config.text.pretrained, config.text.tokens = "/gone", 13
  about = {"of": loop._sources(config), "fields": {"text.positions": 12}}
  (tmp_path / "towers.json").write_text(json.dumps(about))
  with pytest.raises(ValueError, match=r"config.text.tokens=13, but /gone knows 12 positions"):
    run(config, tmp_path, ONE)
  (tmp_path / "towers.json").unlink()
  (tmp_path / "towers.json").mkdir()
  with pytest.raises(ValueError, match=r"^the workdir .* cannot be read \(IsADirectoryError"):
    run(config, tmp_path, ONE)
