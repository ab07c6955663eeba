"""Comparison: grouping, mean ± std, what is noise, and what cannot be compared."""

import json

import numpy as np
import pytest

from xe_retrieval import compare
from xe_retrieval.report import comparison
from xe_retrieval.retrieval import evaluation
from xe_retrieval.retrieval.pairs import Pairs


@pytest.fixture(scope="module")
def curves():
  random = np.random.default_rng(0)
  image = random.standard_normal((30, 8)).astype(np.float32)
  pairs = Pairs(image, image, np.arange(30), [""] * 30, lambda m: b"")
  return evaluation.evaluate(pairs)


def test_mean_std_and_marks(curves, tmp_path):
  for seed, (a, b) in enumerate([(10, 14), (11, 15), (12, 16)]):
    _run(tmp_path, curves, "sampled_softmax", seed, pr_auc=a, recall=20 + seed)
    _run(tmp_path, curves, "cross_example_softmax", seed, pr_auc=b, recall=20.5 + seed)
  text, page = compare.compare(sorted(tmp_path.glob("*_*")), tmp_path / "out")
  sampled = next(line for line in text.splitlines() if line.startswith("Sampled"))
  crossed = next(line for line in text.splitlines() if line.startswith("Cross"))
  assert "11.00 ± 1.00 " in sampled and "15.00 ± 1.00*" in crossed
  assert "21.00 ± 1.00≈" in sampled and "21.50 ± 1.00*" in crossed
  source = page.read_text()
  assert "15.00 ± 1.00" in source and 'class="number noise"' in source
  assert (
    (tmp_path / "out" / "comparison.csv").read_text().startswith("Loss,Seeds,PR-AUC,PR-AUC std")
  )
  for name in ("score_distributions", "precision_recall", "recall"):
    assert (tmp_path / "out" / f"{name}.png").exists()


def test_one_seed_is_judged_by_the_bootstrap(curves, tmp_path):
  runs = [
    _run(tmp_path, curves, "sampled_softmax", 0, pr_auc=10, recall=20),
    _run(tmp_path, curves, "cross_example_softmax", 0, pr_auc=11, recall=40),
  ]
  for run in runs:  # half-width 1.96: standard error 1, of the difference 1.41
    run.metrics["intervals"]["pr_auc"] = [
      run.metrics["pr_auc"] - 1.96,
      run.metrics["pr_auc"] + 1.96,
    ]
    run.metrics["intervals"]["text_to_image"]["recall@1"] = [18.04, 21.96]
  table = comparison.summary(comparison.group(runs))
  assert table.columns[2:4] == ["PR-AUC", "R@1"]
  assert [cell.mark for cell in table.rows[0][2:4]] == ["noise", ""]
  assert [cell.mark for cell in table.rows[1][2:4]] == ["best", "best"]
  assert str(table.rows[0][2]) == "10.00"


def test_other_settings_are_other_groups(curves, tmp_path):
  a = _run(tmp_path, curves, "snm", 0)
  b = _run(tmp_path, curves, "snm", 1)
  b.config["image"]["size"] = 64
  assert list(comparison.group([a, b])) == ["SNM image.size=32", "SNM image.size=64"]
  with pytest.raises(ValueError, match="are the same run: SNM, seed 0"):
    comparison.group([a, comparison.Run("elsewhere", a.metrics, a.curves)])


def test_only_the_same_data_is_comparable(curves, tmp_path):
  _run(tmp_path, curves, "snm", 0)
  _run(tmp_path, curves, "l_softmax", 0, dataset="shapes/7")
  with pytest.raises(
    ValueError, match="not evaluated on the same data: .*shapes/7:test, 30 captions"
  ):
    compare.compare(sorted(tmp_path.glob("*_*"))[::-1], tmp_path / "out")
  with pytest.raises(ValueError, match="holds no metrics.json; python -m xe_retrieval.evaluate"):
    compare.compare([tmp_path / "nowhere"], tmp_path / "out")


def test_the_paper_stands_beside_its_own_data(curves, tmp_path):
  run = _run(tmp_path, curves, "snm", 0, dataset="conceptual_captions")
  rows = comparison.summary(comparison.group([run])).rows
  assert rows[1][0] == "the paper: SNM"
  assert [str(cell) for cell in rows[1][2:6]] == ["14.80", "26.08", "50.71", "61.41"]


def test_distractors_and_thresholds_stand_on_the_right(curves, tmp_path):
  runs = [_run(tmp_path, curves, loss, 0) for loss in ("snm", "sampled_softmax")]
  chosen = {"target_precision": 0.5, "threshold": 0.4, "precision": 0.48}
  for run, area in zip(runs, (3.0, 4.0), strict=True):
    far = {k: run.metrics[k] for k in ("text_to_image", "intervals")}
    run.metrics["distractors"] = {"images": 5000, "pr_auc": area, **far}
    run.metrics["transfer"] = {"thresholds": [chosen]}
  table = comparison.summary(comparison.group(runs))
  assert table.columns[-5:] == ["PR-AUC", "R@1", "R@5", "R@10", "R@100"]
  assert table.spans == [("", 2), ("30 images", 6), ("and 5,000 distractors", 5)]
  assert str(table.rows[1][-5]) == "4.00"
  assert "─ and 5,000 distractors ─" in comparison.as_text(table).splitlines()[0]
  text, page = comparison.write(tmp_path, runs)
  assert '<th colspan="5">and 5,000 distractors</th>' in page.read_text()
  header = (tmp_path / "comparison.csv").read_text().splitlines()[0]
  assert "PR-AUC 30 images" in header and "PR-AUC and 5,000 distractors" in header
  assert (tmp_path / "transfer.csv").read_text().splitlines()[1] == "SNM,48.0,,,"
  runs[1].metrics["distractors"]["images"] = 6000  # another amount: not comparable
  assert not comparison.summary(comparison.group(runs)).over


def _run(root, found, loss, seed, pr_auc=10.0, recall=20.0, dataset="shapes/20000"):
  """A workdir as evaluation leaves it; some figures replaced."""
  metrics = json.loads(json.dumps(found.metrics))
  metrics.update(pr_auc=pr_auc, dataset=dataset, split="test", step=100)
  metrics["text_to_image"]["recall@1"] = recall
  metrics["config"] = {"loss": loss, "seed": seed, "image": {"size": 32}}
  workdir = root / f"{loss}_{seed}"
  out = workdir / "evaluation" / "test"
  out.mkdir(parents=True)
  (out / "metrics.json").write_text(json.dumps(metrics))
  np.savez_compressed(out / "curves.npz", **found.curves)
  return comparison.Run(str(workdir), metrics, found.curves)
