"""Classification by captions: labels that fit, none of these, and words for what is wrong."""

import json
import shutil

import numpy as np
import pytest

from xe_retrieval.search import image_sources, searcher
from xe_retrieval.zero_shot import __main__ as zero_shot
from xe_retrieval.zero_shot import classification

LABELS = ["a red circle", "a blue square", "two green triangles"]


@pytest.fixture(scope="session")
def classifier(workdir):
  return classification.open_classifier(workdir, LABELS)


@pytest.fixture
def labels(tmp_path):
  path = tmp_path / "labels.txt"
  path.write_text("# shapes\n" + "\n".join(LABELS) + "\n\n")
  return str(path)


def test_labels_have_the_probability_that_search_shows(classifier, photos, index):
  answers, failed = classifier.classify([image_sources.Folder(photos)], min_probability=0.0)
  assert len(answers) == 30 and not failed
  search = searcher.open_index(index)
  for found in search.answers(LABELS, top=30, min_probability=0.0):
    theirs = {hit["image"]: hit["probability"] for hit in found["results"]}
    names = list(theirs)
    ours = {
      a.image: next(x["probability"] for x in a.fitting if x["label"] == found["query"])
      for a in answers
    }
    assert ours.keys() == theirs.keys()
    # A score between two roundings may take either: 1e-4, of which the probability makes more.
    ours, theirs = ([of[n] for n in names] for of in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    np.testing.assert_allclose(np.median(np.abs(np.subtract(ours, theirs))), 0, atol=1.1e-4)


def test_none_of_these(classifier, photos):
  everything, _ = classifier.classify([image_sources.Folder(photos)], min_probability=0.0)
  best = np.array([a.nearest["probability"] for a in everything])
  least = float(np.median(best)) + 1e-4
  answers, _ = classifier.classify([image_sources.Folder(photos)], min_probability=least)
  assert [bool(a.fitting) for a in answers] == list(best >= least)
  assert 0 < sum(bool(a.fitting) for a in answers) < 30
  for answer in answers:
    shown = [label["probability"] for label in answer.fitting]
    assert shown == sorted(shown, reverse=True) and all(p >= least for p in shown)
  assert answers[0].to_dict()["label"] in (*LABELS, None)
  lines = zero_shot.table(answers).splitlines()
  assert sum("none of these (nearest: a" in line for line in lines) == sum(best < least)


def test_templates_are_averaged(workdir, model, photos):
  templates = ["{}", "a drawing of {}"]
  made = classification.open_classifier(workdir, LABELS, templates)
  vectors = sum(model.embed_text([t.format(label) for label in LABELS]) for t in templates)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  images = sorted(str(p) for p in photos.rglob("*.png"))
  expected = vectors @ model.embed_images(images).T  # [3, 30]
  answers, _ = made.classify([image_sources.Folder(photos)], threshold=-1.0)
  for i, answer in enumerate(sorted(answers, key=lambda a: a.image)):
    scores = {x["label"]: x["score"] for x in answer.fitting}
    np.testing.assert_allclose([scores[n] for n in LABELS], expected[:, i], atol=1e-3)


def test_a_stranger_stays_one_in_a_template_of_known_words(workdir, photos):
  made = classification.open_classifier(workdir, ["qwxyz", "circle"], ["there is a red {}"])
  stranger, known = (queries.familiarity for _, queries in made._known)
  assert stranger == -np.inf and np.isfinite(known)
  answers, _ = made.classify([image_sources.Folder(photos)], min_probability=0.0)
  shown = [{x["label"]: x["probability"] for x in answer.fitting} for answer in answers]
  assert all(x["qwxyz"] == 0 for x in shown) and any(x["circle"] > 0 for x in shown)


def test_a_model_that_was_not_evaluated(workdir, photos, labels, tmp_path):
  bare = tmp_path / "bare"
  shutil.copytree(workdir, bare)
  (bare / "calibration.json").unlink()
  with pytest.raises(ValueError, match="not evaluated: .* or give a threshold"):
    zero_shot.zero_shot(str(bare), labels, [str(photos)])
  (photos / "broken.png").write_bytes(b"no picture")
  answers, failed = zero_shot.zero_shot(str(bare), labels, [str(photos)], threshold=-1.0)
  assert {a.fitting[0]["probability"] for a in answers} == {None} and len(answers) == 30
  assert [name for name, _ in failed] == [str(photos / "broken.png")]
  assert all(len(line.split()) for line in zero_shot.table(answers).splitlines()[:30])
  json.dumps([a.to_dict() for a in answers], allow_nan=False)


@pytest.mark.parametrize(
  ("content", "more", "message"),
  [
    ("", {}, "holds no label"),
    ("a cat\na cat\n", {}, "names 'a cat' more than once"),
    ("a cat", {"templates": ["a photo"]}, "'a photo' has no {}"),
    ("a cat", {"images": []}, "classify what"),
    ("a cat", {"images": ["nowhere"]}, "neither a folder nor a data set"),
    ("a cat", {"workdir": ""}, "classify with what"),
    ("a cat", {"min_probability": 0.5, "threshold": 0.1}, "exclude each other"),
  ],
)
def test_what_is_wrong_is_said(workdir, photos, tmp_path, content, more, message):
  path = tmp_path / "labels.txt"
  path.write_text(content)
  arguments = {"workdir": str(workdir), "labels": str(path), "images": [str(photos)]} | more
  with pytest.raises(ValueError, match=message):
    zero_shot.zero_shot(**arguments)
  with pytest.raises(ValueError, match="no readable file"):
    classification.read_labels(tmp_path / "missing.txt")
