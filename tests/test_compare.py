"""Comparison: grouping, mean ± std, significance, and runs that cannot be compared."""

import json

import numpy as np
import pytest

from xe_retrieval import compare
from xe_retrieval.evaluation import figures
from xe_retrieval.evaluation.embedded import Images, Pairs
from xe_retrieval.report import comparison, significance, terminal


@pytest.fixture(scope="module")
def curves():
  random = np.random.default_rng(0)
  image = random.standard_normal((30, 8)).astype(np.float32)
  pairs = Pairs(image, Images(image), np.arange(30), [""] * 30, lambda m: b"")
  return figures.evaluate(pairs)


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


def test_one_seed_is_compared_by_bootstrap(curves, tmp_path):
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
    del run.curves["query_ranks"]  # an older evaluation
  table = _summary(runs)
  assert table.columns[2:4] == ["PR-AUC", "R@1"]
  assert [cell.mark for cell in table.rows[0][2:4]] == ["noise", ""]
  assert [cell.mark for cell in table.rows[1][2:4]] == ["best", "best"]
  assert str(table.rows[0][2]) == "10.00"
  _, page = comparison.write(tmp_path, runs)
  assert "Query by query" not in page.read_text() and not (tmp_path / "pairwise.csv").exists()


@pytest.mark.parametrize(("lost", "p", "mark"), [(5, 2 / 32, "noise"), (6, 2 / 64, "")])
def test_one_seed_is_compared_query_by_query(curves, tmp_path, lost, p, mark):
  best = _run(tmp_path, curves, "cross_example_softmax", 0, recall=100)
  other = _run(tmp_path, curves, "sampled_softmax", 0, recall=100 - 100 * lost / 30)
  for run, first in ((best, 30), (other, 30 - lost)):
    run.curves["query_ranks"] = np.where(np.arange(30) < first, 0, 3)
    # Bootstrap intervals that would say the opposite.
    run.metrics["intervals"]["text_to_image"]["recall@1"] = [0, 100] if mark == "" else [99, 99]
  table = _summary([best, other])
  assert [row[3].mark for row in table.rows] == ["best", mark]
  groups = comparison.group([best, other])
  (row,) = comparison.pairwise(groups, significance.paired(groups)).rows
  assert [str(cell) for cell in row[:4]] == [
    "Sampled Softmax",
    f"{-100 * lost / 30:.2f}",
    "0",
    str(lost),
  ]
  assert float(row[4]) == pytest.approx(p, rel=0.01)


def test_losses_are_listed_by_their_distance_from_the_best(curves, tmp_path):
  runs = []
  for loss, first in (("snm", 12), ("l_softmax", 28), ("sampled_softmax", 20)):
    for seed in (0, 1):
      run = _run(tmp_path, curves, loss, seed, recall=100 * first / 30)
      run.curves["query_ranks"] = np.where((np.arange(30) + seed) % 30 < first, 0, 3)
      run.curves["query_image"] = np.arange(30) // 2  # the captions of an image stay together
      runs.append(run)
  groups = comparison.group(runs)
  table = comparison.pairwise(groups, significance.paired(groups))
  assert [row[0] for row in table.rows] == ["Sampled Softmax", "SNM"]
  assert str(table.rows[0][1]) == "-26.67"
  assert "images whose captions it answers better or worse" in table.text
  # Queries 19 … 27 are lost by one seed or both: those of images 9 … 13.
  assert [str(cell) for cell in table.rows[0][2:4]] == ["0", "5"]
  assert float(table.rows[1][4]) < float(table.rows[0][4])
  text, page = comparison.write(tmp_path, runs)
  assert "Query by query" in page.read_text() and "3 losses, 6 runs" in page.read_text()
  assert (tmp_path / "pairwise.csv").read_text().splitlines()[1].startswith("Sampled Softmax,-26.6")


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


def test_paper_results_are_shown_for_its_data_sets(curves, tmp_path):
  run = _run(tmp_path, curves, "snm", 0, dataset="conceptual_captions")
  rows = _summary([run]).rows
  assert rows[1][0] == "the paper: SNM"
  assert [str(cell) for cell in rows[1][2:6]] == ["14.80", "26.08", "50.71", "61.41"]


def test_distractor_columns(curves, tmp_path):
  runs = [_run(tmp_path, curves, loss, 0) for loss in ("snm", "sampled_softmax")]
  for run, area in zip(runs, (3.0, 4.0), strict=True):
    far = {k: run.metrics[k] for k in ("text_to_image", "intervals")}
    run.metrics["distractors"] = {"images": 5000, "pr_auc": area, **far}
  table = _summary(runs)
  assert table.columns[-5:] == ["PR-AUC", "R@1", "R@5", "R@10", "R@100"]
  assert table.groups == [("", 2), ("30 images", 6), ("and 5,000 distractors", 5)]
  assert str(table.rows[1][-5]) == "4.00"
  assert "─ and 5,000 distractors ─" in terminal.table(table).splitlines()[0]
  _, page = comparison.write(tmp_path, runs)
  assert '<th colspan="5">and 5,000 distractors</th>' in page.read_text()
  header = (tmp_path / "comparison.csv").read_text().splitlines()[0]
  assert "PR-AUC 30 images" in header and "PR-AUC and 5,000 distractors" in header
  runs[1].metrics["distractors"]["images"] = 6000  # another number of distractors: not comparable
  assert not _summary(runs).group_titles


def test_promises_kept(curves, tmp_path):
  runs = [_run(tmp_path, curves, "snm", seed) for seed in range(3)]
  other = _run(tmp_path, curves, "sampled_softmax", 0)  # not calibrated
  for run, kept, bound in zip(runs, (0.48, 0.5, 0.52), (0.5, 0.49, None), strict=True):
    row = {"relevance": "pairing", "gallery": 30, "threshold": 0.1, "target": 0.5}
    rows = [row | {"guarantee": False, "kept": kept}, row | {"guarantee": True, "kept": bound}]
    nothing = row | {"target": 0.9, "threshold": None, "kept": None}
    rows += [nothing | {"guarantee": guarantee} for guarantee in (False, True)]
    rows += [row | {"gallery": 900, "guarantee": False, "kept": 0.4}]
    run.metrics["promises"] = rows
  text, page = comparison.write(tmp_path, [*runs, other])
  table = comparison.promises(comparison.group([*runs, other]))
  assert table.columns == ["Loss", "Relevance", "Images", "50 %", "90 %", "50 %", "90 %"]
  assert [[str(cell) for cell in row] for row in table.rows] == [
    ["SNM", "pairing", "30", "50.0 ± 2.0", "–", "1 of 2", "–"],
    ["SNM", "pairing", "900", "40.0 ± 0.0", "–", "–", "–"],
  ]
  assert "50.0 ± 2.0" in text and "1 of 2" in page.read_text()
  assert (tmp_path / "promises.csv").exists()


def test_calibration_figures(curves, tmp_path):
  runs = [_run(tmp_path, curves, "snm", seed) for seed in range(2)]
  old = _run(tmp_path, curves, "sampled_softmax", 0)
  for run, ece, whole in zip(runs, (0.01, 0.03), (0.3, 0.4), strict=True):
    run.metrics["calibration"] |= {"ece": ece, "opis": 0.002, "ap_global": whole}
    run.metrics["calibration"]["ap_per_query"] = 0.5
  for key in ("opis", "opis_strict", "ap_global", "ap_per_query"):
    del old.metrics["calibration"][key]
  table = comparison.calibration(comparison.group([*runs, old]))
  assert table.columns[-4:] == ["ECE", "OPIS", "OPIS strict", "AP ratio"]
  new, without = ([str(cell) for cell in row] for row in table.rows)
  assert (new[-4], new[-3], new[-1]) == ("0.0200 ± 0.0141", "0.0020 ± 0.0000", "0.700 ± 0.141")
  assert without[-4:] == ["–"] * 4 and without[1] != "–"


def _summary(runs):
  groups = comparison.group(runs)
  return comparison.summary(groups, significance.paired(groups))


def _run(root, found, loss, seed, pr_auc=10.0, recall=20.0, dataset="shapes/20000"):
  """A workdir as evaluation leaves it, with some metrics replaced."""
  metrics = json.loads(json.dumps(found.metrics))
  metrics.update(pr_auc=pr_auc, dataset=dataset, split="test", step=100)
  metrics["text_to_image"]["recall@1"] = recall
  metrics["config"] = {"loss": loss, "seed": seed, "image": {"size": 32}}
  workdir = root / f"{loss}_{seed}"
  out = workdir / "evaluation" / "test"
  out.mkdir(parents=True)
  (out / "metrics.json").write_text(json.dumps(metrics))
  np.savez_compressed(out / "curves.npz", **found.curves)
  return comparison.Run(str(workdir), metrics, dict(found.curves))
