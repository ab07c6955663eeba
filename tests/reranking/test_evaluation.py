"""evaluate --rerank on tiny models; its figures, files, report and refusals."""

import json
import shutil

import jax
import numpy as np
import pytest

from tests.conftest import tiny
from xe_retrieval import compare, evaluate, main
from xe_retrieval.report import terminal
from xe_retrieval.reranking import evaluation, lists, scorer


@pytest.fixture(scope="module")
def evaluated(first_stage_dir, trained):
  return evaluate.evaluate(first_stage_dir, "test", rerank=str(trained[0]), candidates=6)


def test_figures_files_and_rows(evaluated, first_stage_dir, trained, tmp_path):
  metrics, report = evaluated
  found = metrics["rerank"]
  assert json.loads((report.parent / "metrics.json").read_text())["rerank"] == found
  assert {"candidates", "text_to_image", "pr_auc", "pairs_per_second"} <= set(found)
  assert found["candidates"] == 6 and found["bytes_per_image"] == 96 and not found["seen"]
  assert found["chosen_on"].endswith(":validation") and found["pairs_per_second"] > 0
  before, plain = found["first_stage"], metrics["text_to_image"]
  assert before["text_to_image"] == pytest.approx(plain)
  assert plain["recall@5"] <= found["ceiling"] <= plain["recall@10"]
  assert found["text_to_image"]["recall@10"] >= found["ceiling"]
  assert 0 <= found["calibration"]["reranked"]["ece"] < 0.5
  printed = terminal.evaluation(metrics)
  assert "text to image, re-ranked 6" in printed and "96 bytes an image" in printed
  assert "Re-ranked" in report.read_text() and (report.parent / "rerank.csv").exists()
  text, _ = compare.compare([str(first_stage_dir)], tmp_path)
  assert "Cross-Example Softmax, re-ranked 6 (Cross-Example Softmax)" in text


def test_the_mixture_is_kept_and_used_again(evaluated, first_stage_dir, trained, monkeypatch):
  known = evaluation.read(trained[0])
  assert known.candidates == 6 and known.weight == evaluated[0]["rerank"]["weight"]
  monkeypatch.setattr(evaluation.Reranking, "_fitted", None)  # a call would fail
  again, _ = evaluate.evaluate(
    first_stage_dir, "test", rerank=str(trained[0]), candidates=6, report=False
  )
  speed = {"pairs_per_second": 0}
  assert again["rerank"] | speed == evaluated[0]["rerank"] | speed


def test_every_pair_and_the_split_that_weights_are_chosen_on(first_stage_dir, trained, tmp_path):
  copy = shutil.copytree(trained[0], tmp_path / "reranker")
  (copy / evaluation.NAME).write_text("{")  # damaged: written anew
  metrics, _ = evaluate.evaluate(
    first_stage_dir, "validation", str(tmp_path / "out"), rerank=str(copy), candidates=None
  )
  found = metrics["rerank"]
  assert found["candidates"] == metrics["images"] and found["ceiling"] == 100 and found["seen"]
  assert found["first_stage"]["pr_auc"] == pytest.approx(metrics["pr_auc"], rel=1e-4)
  assert evaluation.read(copy).candidates is None


def test_blocks_give_what_pairs_give_alone(first, trained, monkeypatch):
  split, known = first.split("validation"), scorer.restore(trained[0])
  random = np.random.default_rng(0)  # more than the few steps of training have made of it
  params = jax.tree.map(lambda x: x + np.float32(random.normal(0, 0.5, x.shape)), known.params)
  found = scorer.Scorer(known.config, params)
  whole, _ = lists.read(split, found, 5, np.arange(20))
  monkeypatch.setattr(scorer, "PAIRS", 3)  # lists in pieces
  parts, _ = lists.read(split, found, 5, np.arange(20))
  np.testing.assert_allclose(parts.logits, whole.logits, rtol=1e-4, atol=1e-5)
  assert np.std(whole.logits, axis=1).min() > 1e-3
  compressed = lists.compress(split, found)
  some = found.logits(split.tokens.of(np.array([7])), compressed, whole.images[7:8],
    whole.first[7:8] / found.config.scale)  # fmt: skip
  np.testing.assert_allclose(some[0], whole.logits[7], rtol=1e-4, atol=1e-5)


def test_other_towers_and_wrong_flags_are_refused(config, trained, data_dir, tmp_path):
  other = tiny(data_dir)
  other.text.freeze = other.image.freeze = "all"
  other.image.size, other.image.depths, other.image.widths = 32, (1, 1), (16, 16)
  other.seed = 7
  main.train(other, tmp_path / "other", jax.devices()[:1])
  with pytest.raises(ValueError, match="reads the tokens of other towers than those of this model"):
    evaluate.evaluate(tmp_path / "other", rerank=str(trained[0]))
  with pytest.raises(ValueError, match="--candidates=0 should be a number of images, or all"):
    evaluate._candidates("0")
  assert evaluate._candidates("all") is None and evaluate._candidates("128") == 128
