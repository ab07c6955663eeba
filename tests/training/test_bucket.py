"""A workdir in a bucket: a run is killed in a save, resumed and evaluated; damage is set aside."""

import json
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.training.test_processes import command
from xe_retrieval import evaluate, main
from xe_retrieval.data import tokenization

ONE = jax.devices()[:1]


@pytest.mark.slow
def test_train_kill_resume_evaluate(config, finished, bucket, tmp_path, capsys):
  config.checkpoint_every, workdir = 1, bucket / "run"
  config.bank.update({"query": 0.5, "image": 0.25, "size": 20})
  arguments = [*command(config, tmp_path / "run")[:-1], f"--workdir={workdir}"]
  child = subprocess.Popen([sys.executable, *arguments], cwd=ROOT)
  while not saving(workdir / "checkpoints"):
    assert child.poll() is None, "it ended before it was killed"
    time.sleep(0.02)
  child.kill()
  child.wait()

  state = jax.device_get(main.train(config, str(workdir), ONE))
  printed = capsys.readouterr().out
  assert "resuming after step" in printed and "damaged" not in printed
  chex.assert_trees_all_equal(state, finished[1])
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines if "loss" in line] == [2, 4]
  boards = [file.name for file in (workdir / "tensorboard").iterdir()]
  assert boards and all("tfevents" in name for name in boards)
  assert tokenization.load(workdir / "tokenizer", config.text).vocab_size > 5

  metrics, report = evaluate.evaluate(str(workdir), "test")
  out = workdir / "evaluation" / "test"
  assert report == out / "report.html" and "<svg" in report.read_text()
  assert json.loads((out / "metrics.json").read_text())["pr_auc"] == metrics["pr_auc"]
  assert {file.suffix for file in out.iterdir()} >= {".csv", ".png", ".svg", ".npz"}
  assert {"bank.npz", "calibration.json"} <= {file.name for file in workdir.iterdir()}
  assert not list(ROOT.glob("gs:*"))

  file = largest(workdir / "checkpoints" / "4" / "model" / "d")
  data = np.frombuffer(file.read_bytes(), np.uint8)
  file.write_bytes((data ^ 1).tobytes())
  again = jax.device_get(main.train(config, str(workdir), ONE))
  assert "checkpoint 4 of gs://" in capsys.readouterr().out
  chex.assert_trees_all_equal(again, state)
  assert (workdir / "damaged" / "4" / "model").is_dir()


def saving(checkpoints):
  """Whether a checkpoint is being written after another one was finished."""
  if not checkpoints.exists():
    return False
  steps = [path for path in checkpoints.iterdir() if path.name.isdecimal()]
  finished = [(path / "commit_success.txt").exists() for path in steps]
  return any(finished) and not all(finished)


def largest(folder):
  return max(folder.iterdir(), key=lambda path: path.stat().length)


def test_a_bucket_that_cannot_be_written_is_one_sentence(config, bucket):
  with pytest.raises(ValueError, match=r"^the workdir gs://absent/run cannot be written \(.*\)$"):
    main.train(config, "gs://absent/run", ONE)
  config.profile_steps = "1:2"
  with pytest.raises(ValueError, match=r"^config.profile_steps='1:2' needs a local workdir$"):
    main.train(config, str(bucket), ONE)
