"""Two processes by two devices are one by four; killed at random, nothing is lost."""

import json
import os
import re
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from tests.conftest import ROOT
from xe_retrieval import settings, train
from xe_retrieval.training import build, mesh
from xe_retrieval.training.checkpoints import Checkpoints

SCRIPT = ROOT / "launch" / "local_processes.sh"


def start(config, workdir, *flags):
  """2 processes × 2 CPU devices, as a user starts them."""
  file = workdir.with_suffix(".py")
  workdir.with_suffix(".json").write_text(settings.to_json(config))
  file.write_text(
    "import pathlib\nfrom xe_retrieval import settings\ndef get_config():\n"
    "  return settings.from_json(pathlib.Path(__file__).with_suffix('.json').read_text())\n"
  )
  command = [sys.executable, "-m", "xe_retrieval.main", f"--config={file}", f"--workdir={workdir}"]
  env = dict(os.environ, JAX_NUM_CPU_DEVICES="2", PYTHON=sys.executable, PYTHONPATH=str(ROOT))
  out = subprocess.run(
    [SCRIPT, "2", "--", *command, *flags],
    env=env, cwd=ROOT, text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip
  assert out.returncode == 0, out.stdout[-3000:]
  return out.stdout


def losses(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
  return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_two_processes_by_two_devices_are_one_by_four(config, tmp_path):
  """Also with the state spread over all of them, in micro-batches, and a frozen tower's cache."""
  config.log_every, config.text.mlp, config.image.freeze = 1, 64, "all"
  config.data.dir = str(tmp_path / "data")  # which the first process makes, and the others await
  config.mesh.shard_parameters, config.micro_batch = True, 8
  # AdamW makes steps of full length of a gradient that is zero but for rounding (keys' biases).
  config.text.optimizer, config.text.learning_rate = "sgd", 0.02
  told = start(config, tmp_path / "two")
  assert "on 4 cpu device(s) of 2 processes" in told
  assert told.count("validation PR-AUC") == 2  # one of them speaks

  one = train.train(config, tmp_path / "one", jax.devices()[:4])
  np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-6)
  trained = settings.from_json((tmp_path / "two" / "config.json").read_text())
  like = build.build(trained, mesh.make(jax.devices()[:4])).state
  two = Checkpoints(tmp_path / "two", read_only=True).restore(config.steps, like)
  chex.assert_trees_all_close(jax.device_get(two), jax.device_get(one), atol=1e-6)


@pytest.mark.slow
def test_killed_at_random_nothing_is_lost():
  out = subprocess.run(
    [sys.executable, "-m", "benchmarks.faults", "--kills=2", "--at_once=1", "--steps=12"],
    cwd=ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
  assert "0 unusable workdirs" in out.stdout and "0 half checkpoints" in out.stdout
  assert re.search(r"\n2 kills in", out.stdout) and "0 ends with other bytes" in out.stdout
