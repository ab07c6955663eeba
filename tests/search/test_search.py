"""The search binary: results above one threshold, or the answer that there are none."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.search.conftest import CAPTIONS
from xe_retrieval import search
from xe_retrieval.retrieval import cutoff
from xe_retrieval.retrieval import searcher as searchers


@pytest.fixture
def searcher(index, model):
  return searchers.open_index(index, model=model)


def run(*arguments, given=""):
  return subprocess.run(
    [sys.executable, "-m", "xe_retrieval.search", *arguments],
    capture_output=True,
    text=True,
    cwd=ROOT,
    input=given,
  )


def test_cut_at_the_threshold(searcher, model):
  scores = model.embed_text(CAPTIONS[:3]) @ searcher.collection.vectors.T
  threshold = float(np.sort(scores[0])[-4:-2].mean())  # three of the first query pass
  found = list(search.search(searcher, CAPTIONS[:3], top=20, threshold=threshold))
  assert [f["query"] for f in found] == CAPTIONS[:3] and len(found[0]["results"]) == 3
  for query, answer in enumerate(found):
    passing = np.sort(scores[query][scores[query] >= threshold])[::-1][:20]
    assert [r["score"] for r in answer["results"]] == [pytest.approx(s, abs=1e-4) for s in passing]
    assert answer["relevant"] == bool(len(passing))
    assert answer["best_score"] == pytest.approx(scores[query].max(), abs=1e-4)
  assert found[0]["results"][0]["image"].startswith("/")  # the file itself
  assert len(next(search.search(searcher, ["a"], top=2, threshold=-1))["results"]) == 2


def test_precision_beside_the_score(searcher, workdir):
  cutoffs = cutoff.read(workdir / cutoff.NAME)
  found = next(search.search(searcher, ["a star"], top=30, min_precision=0.3))
  assert found["threshold"] == pytest.approx(cutoffs.at_precision(0.3), abs=1e-4)
  for result in found["results"]:
    assert result["precision"] >= 0.3
    expected = cutoffs.precision_at(result["score"])
    assert result["precision"] == pytest.approx(expected, abs=0.011)  # one row of the curve
  default = next(search.search(searcher, ["a star"]))["threshold"]
  assert default == pytest.approx(cutoffs.at_precision(cutoffs.default), abs=1e-4)


def test_without_an_evaluation_only_by_threshold(index, model):
  plain = searchers.Searcher(searchers.Collection(index), model, None)
  with pytest.raises(ValueError, match="was not evaluated: python -m xe_retrieval.evaluate"):
    list(search.search(plain, ["a"]))
  found = next(search.search(plain, ["a"], threshold=-1))
  assert found["results"][0]["precision"] is None


def test_a_model_that_is_gone_or_another(index, tmp_path):
  with pytest.raises(ValueError, match="--workdir names where the model of this index is now"):
    searchers.open_index(index, tmp_path / "nowhere")


def test_thresholds_kept_with_the_index(index, model, workdir, tmp_path):
  """Those of another model are not taken; those known when it was indexed are."""
  (tmp_path / "moved").mkdir()
  for name in ("config.json", "tokenizer", "checkpoints"):
    (tmp_path / "moved" / name).symlink_to(workdir / name)
  found = searchers.open_index(index, tmp_path / "moved", model)
  assert found.cutoffs.path.parent == found.collection.directory


def test_queries_from_standard_input_as_json(index):
  lines = "a red circle\n\n<b>two</b> \x00 shapes\n"
  done = run(f"--index={index}", "--queries=-", "--json", "--threshold=-1", "--top=2", given=lines)
  assert done.returncode == 0, done.stderr
  first, second = map(json.loads, done.stdout.splitlines())
  assert (first["query"], first["threshold"], first["relevant"]) == ("a red circle", -1, True)
  assert set(first["results"][0]) == {"image", "score", "precision"} and len(first["results"]) == 2
  assert second["query"] == "<b>two</b> \x00 shapes"


def test_nothing_relevant_is_exit_code_1(index):
  done = run(f"--index={index}", "two dogs on a beach", "--threshold=1")
  assert done.returncode == 1
  words = done.stdout.strip()
  assert words.startswith("nothing relevant (best score ") and words.endswith("threshold 1.00)")


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--index=i"], "search for what?"),
    (["--index=i", "a", "--queries=-"], "search for what?"),
    (["--index=i", "a", "--min_precision=2"], "is not a number in the range [0, 1]"),
    (["a"], "--index"),
  ],
)
def test_wrong_use_is_exit_code_2(arguments, sentence):
  done = run(*arguments)
  assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
