"""A table's run: trained, evaluated on both splits, and not done again."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xe_retrieval import table


def test_one_seed_after_the_other(tmp_path):
  runs = table.workdirs(tmp_path, ["snm", "sigmoid"], [0, 3])
  assert [path.name for path in runs.values()] == ["snm-0", "sigmoid-0", "snm-3", "sigmoid-3"]


@pytest.mark.slow
def test_trains_evaluates_and_knows_that_it_did(config, tmp_path):
  workdir = tmp_path / "snm-0"
  config.loss = "snm"
  assert not table.is_done(workdir)
  assert table.run(config, workdir, ["shapes/64:train"])
  assert table.is_done(workdir)
  validation, test = (
    json.loads((workdir / "evaluation" / split / "metrics.json").read_text())
    for split in table.SPLITS
  )
  assert validation["config"]["loss"] == "snm"
  assert validation["distractors"]["images"] == test["distractors"]["images"] == 64
  chosen = json.loads((workdir / "evaluation/validation/thresholds.json").read_text())
  found = test["transfer"]["thresholds"]
  reached = [row["threshold"] for row in chosen["targets"] if row["threshold"] is not None]
  assert [row["threshold"] for row in found] == reached and "transfer" not in validation
  kept = json.loads((workdir / "thresholds.json").read_text())  # what search cuts by
  assert kept["split"] == "validation"
  config.steps = 5  # would be refused, if it trained again
  assert table.run(config, workdir, ["shapes/64:train"])


def test_says_what_is_wrong():
  found = subprocess.run(
    [sys.executable, "-m", "xe_retrieval.table", "--config=configs/quickstart.py", "snm"],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert found.returncode != 0 and "--out" in found.stderr
