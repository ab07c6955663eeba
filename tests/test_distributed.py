"""evaluate and index over two processes: what one process writes, to the bit."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT, tiny
from xe_retrieval import main

SCRIPT = ROOT / "launch" / "local_processes.sh"
BOTH = """
import sys
from xe_retrieval import evaluate, index, model
from xe_retrieval.evaluation import score_tiles
from xe_retrieval.training import features, processes

# So small that both have something to do.
model.BATCH = features.BATCH = 16
model.Encoder.__init__.__defaults__ = (None, 16, None)
processes.SHARD, score_tiles.QUERIES, score_tiles.DOCUMENTS = 1, 32, 16
processes.join()
workdir, out = sys.argv[1:]
options = dict(distractors=["shapes/64:train"], report=False)
evaluate.evaluate(workdir, "test", f"{out}/test", **options)
index.index(workdir, ["shapes/64:test", "shapes/64:train"], f"{out}/index")
"""


@pytest.mark.slow
def test_two_processes_write_what_one_does(data_dir, tmp_path):
  config = tiny(data_dir)
  config.image.freeze = "all"  # features are computed by both, too
  config.bank.update({"query": 0.5, "image": 0.25, "familiarity": 0.5, "size": 20})
  main.train(config, str(tmp_path / "run"))
  metrics, vectors, calibrations = [], [], []
  for count in (1, 2):
    for file in ("calibration.json", "bank.npz"):
      (tmp_path / "run" / file).unlink(missing_ok=True)
    out = tmp_path / str(count)
    env = dict(os.environ, JAX_NUM_CPU_DEVICES="1", PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    command = [SCRIPT, str(count), "--", sys.executable, "-c", BOTH, tmp_path / "run", out]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=600)
    metrics.append((out / "test" / "metrics.json").read_text())
    calibrations.append((tmp_path / "run" / "calibration.json").read_text())
    found = json.loads((out / "index" / "collection.json").read_text())
    vectors.append(np.load(out / "index" / found["generation"] / "vectors.npy"))
    assert not (out / "index" / "partial").exists()
    assert sorted(p.name for p in out.iterdir()) == ["index", "test"]  # no shards are left
  assert metrics[0] == metrics[1]
  assert calibrations[0] == calibrations[1]
  np.testing.assert_array_equal(*vectors)
