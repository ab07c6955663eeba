"""The evaluation binary on a run that was just trained, and what it says when it cannot."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from xe_retrieval import compare, evaluate, main
from xe_retrieval.report import terminal


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
def test_train_evaluate_compare(config, runs):
  config.bank.update({"query": 0.5, "image": 0.25, "familiarity": 0.5, "size": 20})
  main.train(config, str(runs / "ce"))
  assert (runs / "ce" / "bank.npz").exists()  # part of the model, whether evaluated or not
  metrics, report = evaluate.evaluate(
    runs / "ce", "validation", distractors=["shapes/64:train"], index="scann"
  )
  out = runs / "ce" / "evaluation" / "validation"
  assert report == out / "report.html"
  assert json.loads((out / "metrics.json").read_text()) == json.loads(json.dumps(metrics))
  assert metrics["step"] in (2, 4) and metrics["config"]["loss"] == "cross_example_softmax"
  for direction in ("text_to_image", "image_to_text"):
    assert list(metrics[direction]) == [
      "recall@1", "recall@5", "recall@10", "recall@100", "median_rank"
    ]  # fmt: skip
    assert 0 <= metrics[direction]["recall@1"] <= metrics[direction]["recall@100"] <= 100
  assert metrics["distractors"]["images"] == 64
  assert metrics["correction"] == {"query": 0.5, "image": 0.25, "familiarity": 0.5, "scale": 20.0}
  assert metrics["plain"]["distractors"]["pr_auc"] != metrics["distractors"]["pr_auc"]
  assert metrics["plain"]["relevance"].keys() == {"truth"}
  assert "− 0.25·b(image)" in terminal.evaluation(metrics)
  assert metrics["index"]["vectors"] == metrics["images"] + 64
  assert metrics["relevance"]["truth"]["relevant_per_query"] > 1
  # Calibrated here, so nothing is promised here; and not yet judged.
  assert metrics["promises"] == [] and metrics["probabilities"]["seen"]
  calibration = json.loads((runs / "ce" / "calibration.json").read_text())
  assert calibration["split"] == "validation" and list(calibration["relevance"]) == [
    "truth",
    "pairing",
  ]
  assert calibration["distractors"] == ["shapes/64:train"]
  assert calibration["relevance"]["truth"]["larger"]["counts"]["images"] == metrics["images"] + 64
  with np.load(out / "curves.npz", allow_pickle=False) as curves:
    assert len(curves["precision"]) == len(curves["recall"])

  # Another split judges the calibration; neither that nor another data set changes it.
  before = (runs / "ce" / "calibration.json").read_bytes()
  metrics, _ = evaluate.evaluate(runs / "ce", "test", report=False)
  names = {"relevance", "target", "gallery", "threshold", "kept", "lower_bound", "returned"}
  assert metrics["promises"] and all(names <= row.keys() for row in metrics["promises"])
  assert {row["gallery"] for row in metrics["promises"]} == {metrics["images"]}
  assert {"ece", "brier", "opis", "ap_global", "ap_per_query"} <= metrics["calibration"].keys()
  evaluate.evaluate(runs / "ce", "train", dataset="shapes/64", report=False)
  assert (runs / "ce" / "evaluation" / "shapes_64_train" / "metrics.json").exists()
  assert (runs / "ce" / "calibration.json").read_bytes() == before
  evaluate.evaluate(runs / "ce", "test", publish=True, report=False)
  assert json.loads((runs / "ce" / "calibration.json").read_text())["split"] == "test"

  text, page = compare.compare([runs / "ce"], runs / "comparison", evaluation="validation")
  assert "Cross-Example Softmax with bank" in text and "Cross-Example Softmax plain" in text
  assert page.exists()


def test_the_figures_for_a_terminal():
  side = {"recall@1": 1, "recall@5": 2, "recall@10": 3, "recall@100": 4, "median_rank": 5}
  metrics = {"queries": 20, "images": 10, "pr_auc": 7, "text_to_image": side, "image_to_text": side}
  metrics["distractors"] = {"images": 99, "pr_auc": 0.5, "text_to_image": side}
  lines = terminal.evaluation(metrics).splitlines()
  assert [line.split()[-6:] for line in lines[1:]] == [
    ["7.00", "1.00", "2.00", "3.00", "4.00", "5.00"],
    ["10", "1.00", "2.00", "3.00", "4.00", "5.00"],
    ["0.50", "1.00", "2.00", "3.00", "4.00", "5.00"],
  ]


def test_audit_and_judgements_for_a_terminal():
  index = {"kind": "scann", "vectors": 30_000, "build_seconds": 2.5, "queries_per_second": 9_000}
  index |= {"neighbours_found": {"1": 99.5, "10": 98}, "drift": {"recall@1": -0.25, "recall@10": 0}}
  assert terminal._index_line(index).splitlines() == [
    "index: scann, 30,000 vectors, built in 2.5 s, 9,000 queries/s",
    "  nearest found: 99.5 % of 1, 98.0 % of 10; drift it causes: R@1 -0.25, R@10 +0.00",
  ]
  found = {"kendall_tau_c": 50.123, "kendall_tau_b": 49, "spearman": 60, "pr_auc": None}
  found |= {"pairs": 5_000, "own_captions_left_out": 158, "not_in_data_set": 3}
  assert terminal._judgements_line("experts.txt", found).splitlines() == [
    "experts.txt: Kendall τc 50.12, τb 49.00, Spearman 60.00, PR-AUC –",
    "  over 5,000 judged pairs; left out: 158 own captions, 3 not in the data set",
  ]


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--workdir=nowhere"], "nowhere is no workdir of a training run"),
    (["--workdir=w", "--judgements=README.txt"], "README.txt: there is no such file"),
    (["--workdir=w", "--relevance=README.txt"], "README.txt: there is no such file"),
    (["runs/ce", "--workdir=w"], "unexpected argument 'runs/ce'"),
    (["--workdir=w", "--index=faiss"], "value should be one of <exact|scann>"),
    ([], "--workdir"),
  ],
)
def test_says_what_is_wrong(arguments, sentence):
  found = subprocess.run(
    [sys.executable, "-m", "xe_retrieval.evaluate", *arguments],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert found.returncode != 0
  assert sentence in found.stderr
  assert "Traceback" not in found.stderr
