"""calibration.json: its cuts, and the file."""

import dataclasses
import json

import numpy as np
import pytest

from tests.calibration.conftest import pairs_with, two_normals
from xe_retrieval.calibration import artifact
from xe_retrieval.calibration.counts import LEVELS
from xe_retrieval.towers import bank as banks

ABOUT = {"model": "abc", "dataset": "d", "split": "validation", "step": 3, "queries": 400}
ABOUT |= {"images": 100, "distractors": ["d:train"]}


@pytest.fixture(scope="module")
def made():
  """Two sources of relevance, and a bank that knows nothing but the queries' level."""
  random = np.random.default_rng(0)
  scores, right = two_normals(random, 400, 100)
  pairs, gallery, pairing = pairs_with(scores, right)
  pairs = dataclasses.replace(pairs, features=random.standard_normal((400, 4)).astype(np.float32))
  some = two_normals(random, 400, 100, 0.05, own=False)[1]
  truth = dataclasses.replace(pairing, name="truth", matrix=lambda rows, part: some[rows])
  known = np.eye(4, dtype=np.float32)
  images = np.eye(100, dtype=np.float32)[:20]
  bank = banks.Bank("abc", list("wxyz"), np.zeros(4, np.float32), known, known, images, 0.5)
  return artifact.make(pairs, gallery, [truth, pairing], bank, ABOUT), pairs


def test_round_trip(made, tmp_path):
  calibration, pairs = made
  calibration.write(tmp_path)
  again = artifact.read(tmp_path, "abc")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["bank.npz", "calibration.json"]
  assert [m.relevance for m in again.meanings] == ["truth", "pairing"] and again.best.counts.queries
  assert again.measured_on() == "d validation (400 captions × 100 images)"
  assert ABOUT.items() <= again.about.items()
  for old, new in zip(calibration.meanings, again.meanings, strict=True):
    z = [
      m.calibrator.logit(pairs.text, c.queries(pairs.captions, pairs.text, pairs.features))
      for m, c in ((old, calibration), (new, again))
    ]
    np.testing.assert_array_equal(*z)
    assert new.cut(700, min_precision=0.5) == old.cut(700, min_precision=0.5)
  again.write(tmp_path)
  assert artifact.read(tmp_path, "abc").about == again.about


def test_only_of_this_model(made, tmp_path):
  assert artifact.read(tmp_path, "abc") is None
  made[0].write(tmp_path)
  assert artifact.read(tmp_path, "other") is None


@pytest.mark.parametrize(
  "damage",
  [
    lambda c: c.update(format=99),
    lambda c: c.pop("relevance"),
    lambda c: c["relevance"].clear(),
    lambda c: c.pop("model"),
    lambda c: c["relevance"]["pairing"].pop("counts"),
    lambda c: c["relevance"]["truth"]["counts"]["relevant"].pop(),
    lambda c: c["relevance"]["truth"]["calibrator"]["curves"][0]["logit"].reverse(),
    lambda c: c["relevance"].update(pairing=None),
  ],
)
def test_a_damaged_file_is_named(made, tmp_path, damage):
  made[0].write(tmp_path)
  path = tmp_path / artifact.NAME
  content = json.loads(path.read_text())
  damage(content)
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=r"calibration\.json is no .* writes it anew") as error:
    artifact.read(tmp_path, "abc")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_another_file_is_named(tmp_path, content):
  (tmp_path / artifact.NAME).write_text(content)
  with pytest.raises(ValueError, match="is no calibration.json that this version reads"):
    artifact.read(tmp_path, "abc")


def test_cut_by_probability(made):
  truth, pairing = made[0].meanings
  for images in (100, 700):
    cut = pairing.cut(images)
    assert (cut.asked, cut.value, cut.score) == ("probability", 0.5, None)
    assert cut.logit == pytest.approx(np.log((images - 1) / 99), abs=1e-3)
    assert pairing.probability(cut.logit, images) == pytest.approx(0.5, abs=1e-3)
    cut = pairing.cut(images, min_probability=0.9)
    assert pairing.probability(cut.logit, images) == pytest.approx(0.9, abs=1e-3)
    assert truth.cut(images).logit == pytest.approx(0, abs=0.1)
    assert cut.expect == pairing.counts.expect(cut.logit, images)


def test_cut_by_wrong_results_and_by_precision(made):
  meaning = made[0].meanings[1]
  cut = meaning.cut(700, max_wrong=2)
  i = np.searchsorted(LEVELS, cut.logit)
  assert (
    cut.asked == "wrong" and cut.expect["wrong_per_query"] <= 2 < meaning.counts.wrong(700)[i - 1]
  )
  cut = meaning.cut(100, min_precision=0.6)
  i = np.searchsorted(LEVELS, cut.logit)
  precision = meaning.counts.precision(100)
  assert cut.asked == "precision" and cut.expect["precision"] >= 0.6 > precision[i - 1]
  sure = meaning.cut(100, min_precision=0.6, guarantee=True)
  assert sure.logit > cut.logit and sure.expect["precision_at_least"] >= 0.6


def test_a_precision_out_of_reach_returns_nothing(made):
  cut = made[0].meanings[1].cut(10**9, min_precision=0.99, guarantee=True)
  assert (cut.logit, cut.score, cut.expect) == (None, None, None)
  assert (cut.asked, cut.value) == ("precision", 0.99)
