"""Models to and from the Hugging Face Hub, which here is a small server of this test."""

import json
import os
import subprocess
import sys

from tests import hub
from tests.conftest import ROOT
from tests.search.conftest import *  # noqa: F403 a tiny model with a calibration

LOAD = """
import json, sys, xe_retrieval
vectors = []
for revision in ("", sys.argv[1]):
  model = xe_retrieval.load("me/shapes", revision=revision)
  vectors.append(model.embed_text(["a red circle"]).round(5).tolist())
try:
  xe_retrieval.load("me/shapes", revision="f" * 40)
except ValueError as e:
  vectors.append(str(e))
print(json.dumps(vectors))
"""
METRICS = {
  "dataset": "shapes/64",
  "split": "test",
  "queries": 100,
  "images": 20,
  "pr_auc": 12.345,
  "text_to_image": {"recall@1": 10.0, "recall@5": 20.0, "recall@10": 30.0},
  "image_to_text": {"recall@1": 11.0, "recall@5": 21.0, "recall@10": 31.0},
  "intervals": {"pr_auc": [10.0, 14.0], "image_to_text": {"recall@5": [19.5, 23.0]}},
}


def test_push_and_load_by_revision(workdir, model, tmp_path):
  (workdir / "evaluation" / "test").mkdir(parents=True, exist_ok=True)
  (workdir / "evaluation" / "test" / "metrics.json").write_text(json.dumps(METRICS))
  with hub.running() as address:
    home = {"HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": address, "HF_TOKEN": "hf_x"}
    environment = os.environ | home | {"HF_HUB_OFFLINE": "0"}

    def run(*command):
      out = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
      )
      assert out.returncode == 0, out.stderr
      return out.stdout

    arguments = [f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--push=me/shapes"]
    line = run("-m", "xe_retrieval.export", *arguments).splitlines()[-1]
    commit, files = hub.Hub.repositories["me/shapes"][-1]
    assert line == f'pushed: xe_retrieval.load("me/shapes", revision="{commit}")'
    assert {"projections.safetensors", "calibration.json", "bank.npz", "config.json"} <= set(files)
    assert {"text/model.safetensors", "text/tokenizer.json", "image/model.safetensors"} <= set(
      files
    )
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: xe_retrieval\n")
    assert "| PR-AUC | 12.35 | 10.00 – 14.00 |" in card
    assert "| image to text R@5 | 21.00 | 19.50 – 23.00 |" in card
    assert "Trained with cross_example_softmax on shapes/" in card
    assert "## Intended use" in card and "## Limits" in card
    found = json.loads(run("-c", LOAD, commit).splitlines()[-1])
    expected = model.embed_text(["a red circle"]).round(5).tolist()
    assert found == [expected, expected, f"me/shapes has no revision '{'f' * 40}'"]
