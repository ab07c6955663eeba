"""A path in a bucket stays one, or is refused in one sentence."""

import subprocess
import sys

import pytest
from etils import epath

from tests.conftest import ROOT
from xe_retrieval.data import datasets, paths
from xe_retrieval.training import features


def test_a_bucket_is_not_a_folder_of_the_current_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert str(paths.absolute("gs://bucket/runs/cc")) == "gs://bucket/runs/cc"
  assert paths.absolute("runs") == epath.Path(tmp_path).resolve() / "runs"
  with pytest.raises(
    ValueError, match=r"^s3://x/runs: s3:// is unknown; use a local path or gs://…$"
  ):
    paths.absolute("s3://x/runs")


def test_a_bucket_needs_its_client(monkeypatch):
  monkeypatch.setattr(paths.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"^gs://x needs a package: pip install .*\[gcs\]"):
    paths.absolute("gs://x")


def test_data_in_a_bucket_are_refused(config):
  config.data.dir = "gs://bucket/datasets"
  for make in (features.directory, lambda c: datasets.builder("shapes/32", c.data.dir)):
    with pytest.raises(
      ValueError, match="config.data.dir needs a local directory, or a bucket that"
    ):
      make(config)


@pytest.mark.parametrize(
  ("module", "arguments"),
  [
    ("prepare", ["--captions=t.tsv", "--images=photos", "--out=gs://bucket/datasets"]),
    ("prepare", ["--webdataset=train=gs://bucket/0.tar"]),
    ("main", ["--config=configs/cc.py", "--workdir=w", "--config.data.dir=gs://bucket/data"]),
    ("main", ["--config=configs/cc.py", "--workdir=w", "--config.text.pretrained=gs://bucket/b"]),
    ("evaluate", ["--workdir=runs/cc", "--relevance=gs://bucket/judged.tsv"]),
    ("index", ["--workdir=runs/cc", "--images=photos", "--out=gs://bucket/index"]),
    ("compare", ["gs://bucket/runs/a", "gs://bucket/runs/b"]),
  ],
)
def test_commands_that_need_a_disk_say_so(module, arguments, tmp_path):
  out = subprocess.run(
    [sys.executable, "-m", f"xe_retrieval.{module}", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert out.returncode == 1 and "should be local: copy it, or mount the bucket" in out.stderr
  assert out.stderr.count("\n") == 1 and not list(ROOT.glob("gs:*"))
