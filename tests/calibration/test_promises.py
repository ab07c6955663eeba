"""Promises and shown probabilities, against counting."""

import dataclasses

import numpy as np
import pytest

from tests.calibration.conftest import pairs_with, two_normals
from xe_retrieval.calibration import artifact, promises
from xe_retrieval.evaluation.embedded import Images

ABOUT = {"model": "abc", "dataset": "d", "split": "validation", "queries": 300, "images": 60}


def test_reliability_by_hand():
  shown = np.array([0.01, 0.03, 0.5, 0.5, 0.5, 1.0])
  right = np.array([False, False, True, False, True, True])
  found = promises.reliability(shown, right)
  # Cells [0, 1/15), [7/15, 8/15) and the last: means 0.02, 0.5, 1; shares 0, 2/3, 1.
  assert found["ece"] == pytest.approx((2 * 0.02 + 3 * (2 / 3 - 0.5) + 0) / 6)
  assert found["brier"] == pytest.approx((0.01**2 + 0.03**2 + 3 * 0.25 + 0) / 6)
  np.testing.assert_allclose(found["reliability"], [[0.02, 0, 2], [0.5, 2 / 3, 3], [1, 1, 1]])


@pytest.fixture(scope="module")
def made():
  """Calibrated on 60 images; 60 others with 40 distractors."""
  random = np.random.default_rng(0)
  pairs, gallery, source = pairs_with(*two_normals(random, 300, 60))
  calibration = artifact.make(pairs, gallery, [source], None, ABOUT)
  scores, right = two_normals(random, 300, 100)
  pairs, _, source = pairs_with(scores, right)
  basis = np.eye(100, dtype=np.float32)
  pairs = dataclasses.replace(pairs, images=Images(basis[:60]))
  parts = [pairs.images, Images(basis[60:])]
  halves = right[:, :60], right[:, 60:]
  source = dataclasses.replace(source, matrix=lambda rows, part: halves[part][rows], parts=2)
  return calibration, pairs, parts, source, right


def test_a_gallery_with_distractors_promises_for_its_own_size():
  """Distractors whose images are easier to tell: counted, not extrapolated from the others."""
  random = np.random.default_rng(1)
  scores, right = two_normals(random, 1500, 100, share=0.02)
  easy, also = two_normals(random, 1500, 100, share=0.02, own=False, means=(0.7, 0.2))
  pairs, gallery, source = pairs_with(scores, right)
  pairs = dataclasses.replace(pairs, text=np.hstack([pairs.text, easy.astype(np.float32)]))
  basis = np.eye(200, dtype=np.float32)
  pairs = dataclasses.replace(pairs, images=Images(basis[:100]))
  parts = [pairs.images, Images(basis[100:])]
  both = right, also
  source = dataclasses.replace(source, matrix=lambda rows, part: both[part][rows], parts=2)
  near = artifact.make(pairs, parts[:1], [source], None, ABOUT).best
  meaning = artifact.make(pairs, parts, [source], None, ABOUT).best
  assert near.larger is None
  assert [meaning.at(n).counts.images for n in (10, 100, 130, 160, 10_000)] == [
    100, 100, 100, 200, 200
  ]  # fmt: skip
  far, guessed = (m.at(200).cut(200, min_precision=0.7) for m in (meaning, near))
  # More can be returned than the harder images alone would say.
  assert far.expect["recall"] > guessed.expect["recall"]
  assert meaning.at(100).cut(100, min_precision=0.7) == near.cut(100, min_precision=0.7)
  # Probabilities are those of this gallery, too: nearer to what is relevant there.
  calibration = artifact.Calibration(ABOUT, [meaning], None)
  known, guess = (
    promises.shown_probability(c, pairs, parts, [source])["pairing"]["ece"]
    for c in (calibration, artifact.Calibration(ABOUT, [near], None))
  )
  assert known < 0.02 < guess


def test_judged_by_counting(made):
  calibration, pairs, parts, source, right = made
  rows = promises.judge(calibration, pairs, parts, [source])
  meaning = calibration.best
  z = meaning.calibrator.logit(pairs.text, calibration.queries([], pairs.text, None))
  asked = [(r["target"], r["guarantee"]) for r in rows]
  assert asked == [(t, g) for t in promises.TARGETS for g in (False, True)]
  for row in rows:
    assert (row["relevance"], row["gallery"]) == ("pairing", 100)
    threshold = meaning.counts.at_precision(row["target"], 100, row["guarantee"])
    assert row["threshold"] == threshold
    if threshold is None:
      assert (row["kept"], row["lower_bound"], row["returned"]) == (None, None, 0)
      continue
    passes = z >= threshold
    assert row["kept"] == right[passes].mean()
    assert row["returned"] == passes.any(axis=1).mean()
    assert not row["guarantee"] or row["lower_bound"] >= row["target"]
  assert sum(row["kept"] is not None for row in rows) >= 5


def test_nothing_returned_is_not_kept_perfectly(made):
  calibration, pairs, parts, source, _ = made
  nothing = dataclasses.replace(pairs, text=np.full_like(pairs.text, -0.9))
  for row in promises.judge(calibration, nothing, parts, [source]):
    assert row["kept"] is None and row["returned"] == 0


def test_shown_probabilities_of_the_first_ten(made):
  calibration, pairs, parts, source, right = made
  found = promises.shown_probability(calibration, pairs, parts, [source])
  meaning = calibration.best
  z = meaning.calibrator.logit(pairs.text, calibration.queries([], pairs.text, None))
  shown, hits = [], []
  for q in range(len(z)):
    best = np.argsort(-pairs.text[q], kind="stable")[:10]
    shown.append(1 / (1 + np.exp(-(z[q, best] - np.log(99 / 59)))))
    hits.append(right[q, best])
  expected = promises.reliability(np.concatenate(shown), np.concatenate(hits))
  assert found.keys() == {"pairing"}
  assert found["pairing"]["ece"] == pytest.approx(expected["ece"])
  assert found["pairing"]["brier"] == pytest.approx(expected["brier"])
  assert found["pairing"]["ece"] < 0.05


def test_a_source_that_does_not_know_the_distractors_is_left_out(made):
  calibration, pairs, parts, source, _ = made
  short = dataclasses.replace(source, parts=1)
  assert promises.judge(calibration, pairs, parts, [short]) == []
  assert promises.shown_probability(calibration, pairs, parts, [short]) == {}
  assert promises.judge(calibration, pairs, parts[:1], [short])[0]["gallery"] == 60
  other = dataclasses.replace(source, name="truth")  # not calibrated by it
  assert promises.judge(calibration, pairs, parts, [other]) == []
