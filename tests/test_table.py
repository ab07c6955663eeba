"""A run of the table: trained, evaluated on both splits, skipped when done."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xe_retrieval import table


def test_workdirs_are_ordered_by_seed(tmp_path):
  runs = table.workdirs(tmp_path, ["snm", "sigmoid"], [0, 3])
  assert [path.name for path in runs.values()] == ["snm-0", "sigmoid-0", "snm-3", "sigmoid-3"]


def test_every_loss_has_what_the_config_recommends_for_it():
  path, given = ROOT / "configs" / "flickr8k.py", {"text.learning_rate": 1e-3}
  one, other = (
    table.configured(path, given, n, 3) for n in ("snm", "corrected_cross_example_softmax")
  )
  assert (one.loss, one.seed, one.text.learning_rate) == ("snm", 3, 1e-3)
  assert one.scale != other.scale and one.bank.query != other.bank.query


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


@pytest.fixture
def script(tmp_path):
  """Runs launch/table.sh with a `python` that only records its arguments; returns the commands."""
  answers = "*default_backend*) echo 1;; *losses.names*) echo snm sigmoid;;"
  body = f'printf "%s|" "$@" >> "$STAGE/log"; echo >> "$STAGE/log"; case "$*" in {answers} esac'
  for name in ("python", "pip"):
    (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (tmp_path / name).chmod(0o755)
  (tmp_path / "venv").mkdir()
  env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STAGE": str(tmp_path)}
  env |= {"VIRTUAL_ENV": str(tmp_path / "venv"), "OUT": str(tmp_path / "out")}

  def run(config, expected=0, **more):
    command = [
      ROOT / "launch" / "table.sh",
      f"configs/{config}.py",
      f"--config.data.dir={tmp_path}",
    ]
    environment = {**os.environ, **env, **more}
    out = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert out.returncode == expected, out.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    return [line.split("|")[:-1] for line in lines if line.startswith("-m|xe_")], out.stderr

  return run


def test_the_script_prepares_coco_and_searches_a_folder_too(script, tmp_path):
  (tmp_path / "c.tsv").touch()
  given = {"COCO_CAPTIONS": f"{tmp_path}/c.tsv", "COCO_DISTRACTORS": "other photos"}
  _, error = script("coco", expected=1, **given)
  assert "COCO_IMAGES= the folder of its photos" in error
  (prepare, part, whole), _ = script("coco", COCO_IMAGES=str(tmp_path), **given)
  assert prepare[1:] == [
    "xe_retrieval.prepare",
    f"--captions={tmp_path}/c.tsv",
    f"--images={tmp_path}",
    "--name=coco",
    f"--out={tmp_path}",
  ]
  assert part == [*whole, "--part=1/1"]
  assert whole[4:] == [
    "--seeds=0,1,2",
    "--losses=snm,sigmoid",
    "--distractors=captions/coco:train",
    "--distractors=other photos",
    "--relevance=eccv",
    f"--config.data.dir={tmp_path}",
  ]


def test_the_script_with_data_that_are_there(script, tmp_path):
  version = tmp_path / "captions" / "flickr8k" / "1.0.0"
  version.mkdir(parents=True)
  (version / "manifest.json").write_text('{"splits": {"extra": {}}}')
  commands, _ = script("flickr8k")
  assert {command[1] for command in commands} == {"xe_retrieval.table"}
  assert "--seeds=0,1,2,3,4" in commands[0] and "--relevance=" in commands[0]
  assert [a for a in commands[0] if "distractors" in a] == [
    "--distractors=captions/flickr8k:train",
    "--distractors=captions/flickr8k:extra",
  ]


def test_distractors_or_judgements_that_do_not_exist_are_told_before_training(config, tmp_path):
  runs = {("snm", 0): tmp_path / "snm-0"}
  with pytest.raises(ValueError, match="nowhere is neither a folder of pictures nor a data set"):
    table._run_all(lambda *_: config, runs, list(runs), ["nowhere"])
  with pytest.raises(ValueError, match="--relevance=nowhere.csv: there is no such file"):
    table._run_all(lambda *_: config, runs, list(runs), [], "nowhere.csv")
  assert not (tmp_path / "snm-0").exists()
