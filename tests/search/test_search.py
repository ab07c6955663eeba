"""The search binary: relevant images with their probability, or the answer that there are none."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.search.conftest import CAPTIONS, UNFAMILIAR
from xe_retrieval.calibration import artifact
from xe_retrieval.search import __main__ as command
from xe_retrieval.search import image_sources, update
from xe_retrieval.search import searcher as searchers
from xe_retrieval.towers import bank


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
  ids, _ = searcher.collection.store.known("photos")
  scores = model.embed_text(CAPTIONS[:3]) @ searcher.collection.store.vectors(ids).T
  threshold = float(np.sort(scores[0])[-4:-2].mean())  # three of the first query pass
  found = list(searcher.answers(CAPTIONS[:3], top=20, threshold=threshold))
  assert [f["query"] for f in found] == CAPTIONS[:3] and len(found[0]["results"]) == 3
  for query, answer in enumerate(found):
    passing = np.sort(scores[query][scores[query] >= threshold])[::-1][:20]
    assert [r["score"] for r in answer["results"]] == [pytest.approx(s, abs=1e-4) for s in passing]
    assert answer["relevant"] == bool(len(passing))
    assert answer["best_score"] == pytest.approx(scores[query].max(), abs=1e-4)
  assert found[0]["results"][0]["image"].startswith("/")  # the file itself
  assert len(next(searcher.answers(["a"], top=2, threshold=-1))["results"]) == 2


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_ranks_by_corrected_scores(photos, model, workdir, tmp_path, monkeypatch, kind):
  """What the bank takes off rides along in the index; images among each other keep cosines."""
  config = model.config.copy_and_resolve_references()
  config.bank.update({"query": 0.5, "image": 0.5, "familiarity": 0.5})
  known = artifact.read(workdir, model.fingerprint()).bank
  plain = model.scoring
  monkeypatch.setattr(model, "scoring", bank.Scoring(config, known))
  path = tmp_path / "corrected"
  update.update_index(path, model, workdir, [image_sources.Folder(photos)], kind=kind)
  searcher = searchers.open_index(path, model=model)
  asked = [*CAPTIONS[:3], UNFAMILIAR]
  ids, _ = searcher.collection.store.known("photos")
  files = [about["path"] for about in searcher.collection.describe(ids)]
  expected = model.score(asked, files)  # [4, 30]
  found = list(searcher.answers(asked, top=30, threshold=-9))
  for scores, answer in zip(expected, found, strict=True):
    got = {r["image"]: r["score"] for r in answer["results"]}
    assert got == {f: pytest.approx(s, abs=2e-4) for f, s in zip(files, scores, strict=True)}
  monkeypatch.setattr(model, "scoring", plain)
  assert np.abs(model.score(asked, files) - expected).min() > 1e-3


def test_a_probability_beside_each_score(searcher):
  everything = next(searcher.answers(["a red circle"], top=30, threshold=-1))
  shown = [result["probability"] for result in everything["results"]]
  assert shown == sorted(shown, reverse=True) and 0.1 < shown[-1] < 0.5 < shown[0] < 0.9
  assert everything["best_probability"] == shown[0] and everything["expect"] is None
  for asked, least in (({}, 0.5), ({"min_probability": 0.4}, 0.4), ({"min_probability": 0.6}, 0.6)):
    found = next(searcher.answers(["a red circle"], top=30, **asked))
    assert found["results"] == [r for r in everything["results"] if r["probability"] >= least]
    # The calibrator's line: 4.2 logits over 0.2 of score, from −2 at −0.48 on.
    needed = -0.48 + 0.2 / 4.2 * (np.log(least / (1 - least)) + 2)
    assert found["threshold"] == pytest.approx(needed, abs=1e-4)


def test_results_reach_the_threshold_and_the_probability_as_shown(searcher):
  """At every cut, though all three are rounded."""
  everything = next(searcher.answers(["a red circle"], top=30, threshold=-1))["results"]
  for least in np.linspace(0.2, 0.8, 61).round(2):
    found = next(searcher.answers(["a red circle"], top=30, min_probability=least))
    assert found["results"] == [r for r in everything if r["probability"] >= least]
    assert found["results"] == [r for r in everything if r["score"] >= found["threshold"]]


def test_each_cut_says_what_to_expect(searcher):
  def ask(**asked):
    return next(searcher.answers(["a red circle"], **asked))

  few, many = (ask(max_wrong=wrong) for wrong in (1, 3))
  assert few["expect"]["wrong_per_query"] <= 1 < many["expect"]["wrong_per_query"] <= 3
  assert few["threshold"] > many["threshold"]
  plain, sure = (ask(min_precision=0.7, guarantee=g) for g in (False, True))
  assert plain["expect"]["precision"] >= 0.7 > plain["expect"]["precision_at_least"]
  assert sure["expect"]["precision_at_least"] >= 0.7 and sure["threshold"] > plain["threshold"]
  never = ask(min_precision=0.99)
  assert (never["threshold"], never["expect"], never["results"]) == (None, None, [])
  assert not never["relevant"] and never["best_probability"] > 0.5


def test_one_way_to_cut(searcher):
  with pytest.raises(ValueError, match="^min_probability and threshold exclude each other"):
    searcher.cut(min_probability=0.5, threshold=0.1)
  with pytest.raises(ValueError, match="^guarantee needs min_precision"):
    searcher.cut(min_probability=0.5, guarantee=True)


def test_an_unfamiliar_query_has_suggestions_and_no_results(searcher):
  strange, known = searcher.answers([UNFAMILIAR, CAPTIONS[0]], min_probability=0.01)
  assert not strange["familiar"] and not strange["relevant"] and strange["best_probability"] == 0
  assert len(strange["suggestions"]) == 3 and set(strange["suggestions"]) <= set(CAPTIONS)
  assert known["familiar"] and known["relevant"] and known["suggestions"] == []


def test_a_few_words_have_a_meaning_of_their_own(searcher):
  """Here 2 logits less than a caption with the same score."""
  meaning = searcher.calibration.best
  curves = [(knots, values - 2) for knots, values in meaning.calibrator.curves]
  calibrator = dataclasses.replace(meaning.calibrator, curves=curves, familiar=np.array([]))
  words = dataclasses.replace(meaning, relevance="words", calibrator=calibrator)
  both = dataclasses.replace(searcher.calibration, words=words)
  several = searchers.Searcher(searcher.collection, searcher.model, both)
  for text, changed in ((CAPTIONS[2], False), ("a red circle", True), (UNFAMILIAR, False)):
    before, after = (next(s.answers([text], threshold=-9)) for s in (searcher, several))
    assert (after["words"], before["words"]) == (changed, False)
    if not changed:
      assert after == before
      continue
    odds = [p / (1 - p) for p in (before["best_probability"], after["best_probability"])]
    assert np.log(odds[0] / odds[1]) == pytest.approx(2, abs=0.01)
    assert next(searcher.answers([text]))["relevant"]
    assert not next(several.answers([text]))["relevant"]


def test_without_an_evaluation_only_by_threshold(index, model):
  plain = searchers.Searcher(searchers.Collection(index), model, None)
  for asked in ({}, {"min_probability": 0.5}, {"max_wrong": 1}, {"min_precision": 0.5}):
    with pytest.raises(ValueError, match="was not evaluated: python -m xe_retrieval.evaluate"):
      list(plain.answers(["a"], **asked))
  found = next(plain.answers(["a"], threshold=-1))
  assert found["results"][0]["probability"] is None and found["best_probability"] is None


def test_a_model_that_is_gone_or_another(index, tmp_path):
  with pytest.raises(ValueError, match="--workdir names where the model of this index is now"):
    searchers.open_index(index, tmp_path / "nowhere")


def test_the_calibration_is_kept_with_the_index(index, model, workdir, tmp_path):
  """That of the workdir now, else the one known when it was indexed; never another model's."""
  (tmp_path / "moved").mkdir()
  for name in ("config.json", "tokenizer", "checkpoints"):
    (tmp_path / "moved" / name).symlink_to(workdir / name)
  found = searchers.open_index(index, tmp_path / "moved", model)
  kept = found.collection.directory
  assert (kept / artifact.NAME).read_bytes() == (workdir / artifact.NAME).read_bytes()
  assert (kept / bank.NAME).exists() and found.calibration.bank.captions == CAPTIONS
  assert next(found.answers(["a red circle"]))["best_probability"] > 0.5
  text = (kept / artifact.NAME).read_text().replace(model.fingerprint(), "another")
  (kept / artifact.NAME).write_text(text)
  assert searchers.open_index(index, tmp_path / "moved", model).calibration is None


def test_queries_from_standard_input_as_json(index):
  lines = "a red circle\n\n<b>two</b> \x00 shapes\n"
  done = run(f"--index={index}", "--queries=-", "--json", "--threshold=-1", "--top=2", given=lines)
  assert done.returncode == 0, done.stderr
  first, second = map(json.loads, done.stdout.splitlines())
  assert (first["query"], first["threshold"], first["relevant"]) == ("a red circle", -1, True)
  assert (
    set(first["results"][0]) == {"image", "score", "probability"} and len(first["results"]) == 2
  )
  assert second["query"] == "<b>two</b> \x00 shapes"


def test_each_line_is_answered_as_it_comes(index, photos):
  """Each answer arrives before the next query is written; with a picture, in its order."""
  picture = photos / "scene007.png"
  command = [sys.executable, "-m", "xe_retrieval.search", f"--index={index}", "--queries=-"]
  command += ["--json", "--threshold=-1", f"--image={picture}", "--weight=0", "--folder=photos"]
  process = subprocess.Popen(
    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  for query in ("a red circle", "a star"):
    process.stdin.write(f"{query}\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    assert (found["query"], found["total"]) == (query, 30)
    assert found["results"][0]["image"] == str(picture)
    assert found["results"][0]["likeness"] == pytest.approx(1, abs=1e-3)
  process.stdin.close()
  assert process.wait(60) == 0


def test_a_picture_alone_and_pages(searcher, photos):
  found = next(searcher.answers(image=str(photos / "scene003.png"), top=4))
  assert found["results"][0]["image"] == str(photos / "scene003.png")
  assert (found["query"], found["total"], found["expect"]) == (None, 30, None)
  later = next(searcher.answers(image=str(photos / "scene003.png"), top=2, offset=2))
  assert later["results"] == found["results"][2:]
  with pytest.raises(ValueError, match="^max_wrong is about words"):
    next(searcher.answers(image=str(photos / "scene003.png"), max_wrong=1))
  with pytest.raises(ValueError, match="no image is in 'elsewhere'"):
    next(searcher.answers(["a"], folder="elsewhere"))


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_totals_and_filters_of_both_kinds_of_index(photos, model, workdir, tmp_path, kind):
  """An approximate index counts only where it has looked at everything that is relevant, or where
  it was asked to."""
  path = tmp_path / kind
  update.update_index(path, model, workdir, [image_sources.Folder(photos)], kind=kind)
  searcher = searchers.open_index(path, model=model)
  few = next(searcher.answers(["a star"], top=3, threshold=-1))
  assert few["relevant"] and few["total"] == (30 if kind == "exact" else None)
  counted = next(searcher.answers(["a star"], top=3, threshold=-1, levels=True))
  assert counted == few | {"total": 30}
  scores = [r["score"] for r in next(searcher.answers(["a star"], top=30, threshold=-1))["results"]]
  known = next(searcher.answers(["a star"], top=10, threshold=scores[4]))
  assert known["total"] == sum(score >= scores[4] for score in scores)
  inside = next(searcher.answers(["a star"], top=3, threshold=-1, folder="photos/deeper"))
  assert inside["total"] == 10 and all("/deeper/" in r["image"] for r in inside["results"])


@pytest.mark.parametrize(
  ("query", "asked", "sentence"),
  [
    (
      "a red circle",
      {"min_probability": 0.99},
      r"best probability \d+\.\d %, best score -0\.\d\d, needed",
    ),
    ("a red circle", {"threshold": 1}, r"best probability .*, needed 1\.00\)"),
    ("a red circle", {"min_precision": 0.99}, "no threshold reaches what is asked for"),
    (UNFAMILIAR, {}, "unlike anything this model was trained on; nearest: 'three shapes'; '"),
  ],
)
def test_nothing_relevant_in_words(searcher, query, asked, sentence):
  found = next(searcher.answers([query], **asked))
  assert not found["relevant"] and not found["results"]
  assert re.match(rf"nothing relevant \({sentence}", command._text(found, several=False))


def test_nothing_relevant_is_exit_code_1(index):
  done = run(f"--index={index}", "a red circle", "--min_precision=0.95", "--guarantee")
  assert (done.returncode, done.stderr) == (1, "")
  assert done.stdout == "nothing relevant (no threshold reaches what is asked for)\n"


def test_probability_score_and_name_are_printed(index):
  done = run(f"--index={index}", "a red circle", "--max_wrong=3")
  assert done.returncode == 0
  assert re.match(r" \d\d\.\d %  -0\.\d{3}  /.*png$", done.stdout.splitlines()[0])


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--index=i"], "search for what?"),
    (["--index=i", "a", "--queries=-"], "search for what?"),
    (["--index=i", "a", "--min_probability=2"], "is not a number in the range [0, 1]"),
    (["--index=i", "a", "--max_wrong=-1"], "--max_wrong=-1"),
    (["a"], "--index"),
  ],
)
def test_wrong_use_is_exit_code_2(arguments, sentence):
  done = run(*arguments)
  assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_two_ways_to_cut_are_exit_code_2(index):
  done = run(f"--index={index}", "a", "--min_probability=0.5", "--max_wrong=1")
  assert done.returncode == 2
  expected = "error: min_probability and max_wrong exclude each other: give one of them"
  assert done.stderr.strip().splitlines()[-1] == expected
