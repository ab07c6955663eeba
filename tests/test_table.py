"""A run of the table: trained, evaluated on both splits, skipped when done."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xe_retrieval import table


def test_workdirs_are_ordered_by_seed(tmp_path):
  runs = table.workdirs(tmp_path, ["snm", "sigmoid"], [0, 3])
  assert [path.name for path in runs.values()] == ["snm-0", "sigmoid-0", "snm-3", "sigmoid-3"]


@pytest.mark.slow
def test_trains_evaluates_and_skips_a_finished_run(config, tmp_path):
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
  assert validation["promises"] == [] and {row["gallery"] for row in test["promises"]} == {
    test["images"],
    test["images"] + 64,
  }
  kept = json.loads((workdir / "calibration.json").read_text())  # read by search
  assert kept["split"] == "validation"
  config.steps = 5  # training again would refuse the changed config
  assert table.run(config, workdir, ["shapes/64:train"])


def test_a_missing_flag_is_named():
  found = subprocess.run(
    [sys.executable, "-m", "xe_retrieval.table", "--config=configs/quickstart.py", "snm"],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert found.returncode != 0 and "--out" in found.stderr
