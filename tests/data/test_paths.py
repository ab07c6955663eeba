"""A path in a bucket stays one, or is refused in one sentence."""

import subprocess
import sys

import pytest
from etils import epath
from ml_collections import ConfigDict

from tests.conftest import ROOT
from xe_retrieval.data import datasets, paths, tokenization
from xe_retrieval.training import features, logs


def test_a_bucket_is_not_a_folder_of_the_current_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert str(paths.absolute("gs://bucket/runs/cc")) == "gs://bucket/runs/cc"
  assert paths.absolute("runs") == epath.Path(tmp_path).resolve() / "runs"
  with pytest.raises(
    ValueError, match=r"^ftp://x/runs: ftp:// is unknown; use a local path or gs:"
  ):
    paths.absolute("ftp://x/runs")


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
    ("evaluate", ["--workdir=gs://bucket/runs/cc"]),
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


def test_what_training_writes_without_orbax_goes_to_a_bucket(bucket, config):
  config.steps = 4
  tokenizer = tokenization.train(["a red square", "a blue circle"], 100, 8)
  tokenizer.save(bucket / "tokenizer")
  again = tokenization.load(bucket / "tokenizer", ConfigDict({"tokens": 8}))
  assert again.fingerprint() == tokenizer.fingerprint()
  for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):  # killed after step 3, resumed after step 2
    writer = logs._Jsonl(bucket / "metrics.jsonl", start)
    for step in steps:
      writer.write(step, {"loss": 1.0})
    writer.close()
  lines = (bucket / "metrics.jsonl").read_text().splitlines()
  assert [logs._step(line) for line in lines] == [1, 2, 3, 4]


@pytest.fixture
def bucket(monkeypatch):
  """gs://bucket in the memory of this process."""
  import fsspec
  from etils.epath import backend, gpath

  class Memory(type(backend.fsspec_backend)):
    def fs(self, path):
      return fsspec.filesystem("memory")

  monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Memory())
  monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
  path = epath.Path("gs://bucket/run")
  path.mkdir(parents=True, exist_ok=True)
  return path
