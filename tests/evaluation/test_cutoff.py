"""thresholds.json: the precision to expect at a score, against counting, and its file."""

import json

import numpy as np
import pytest

from xe_retrieval.evaluation import precision_recall, thresholds

ABOUT = {"model": "abc", "dataset": "d", "split": "test", "step": 1, "queries": 300, "images": 300}


@pytest.fixture(scope="module")
def curve():
  random = np.random.default_rng(0)
  image = random.standard_normal((300, 12)).astype(np.float32)
  text = image + 0.6 * random.standard_normal((300, 12)).astype(np.float32)
  text, image = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
  return precision_recall.curve(text, image, np.arange(300))


@pytest.fixture
def path(curve, tmp_path):
  path = tmp_path / thresholds.NAME
  thresholds.write(path, ABOUT, [{"target_precision": 0.5}], {"pairing": thresholds.points(curve)})
  return path


def test_lowest_thresholds_are_those_of_the_whole_curve(curve, path):
  found = thresholds.read(path)
  assert found.threshold[0] == -1 and found.returned[0] == curve.pairs == 90_000
  assert (np.diff(found.threshold) > 0).all() and (np.diff(found.precision) > 0).all()
  for target in (0.1, 0.3, 0.5):
    exact = thresholds.at_precision(curve, target)
    assert found.at_precision(target) == exact.threshold
    row = np.searchsorted(found.threshold, exact.threshold)
    assert found.recall[row] == exact.recall and found.returned[row] == exact.returned


def test_a_score_is_worth_the_precision_iff_it_passes_the_threshold(path):
  found = thresholds.read(path)
  scores = np.random.default_rng(1).uniform(-1, 1, 2000)
  for target in np.linspace(0.01, found.precision[-1], 40):
    passes = scores >= found.at_precision(target)
    np.testing.assert_array_equal(found.precision_at(scores) >= target, passes)
  assert found.precision_at(-1.0) == pytest.approx(300 / 90_000)


def test_few_pairs_promise_nothing(tmp_path):
  """The ten best are all right, but too few to tell."""
  scores, true, returned = np.float32([0.9, 0.5]), np.array([10, 30]), np.array([10, 60])
  curve = precision_recall.Curve(scores, true, returned, 30, 900)
  thresholds.write(tmp_path / "t", ABOUT, [], {"pairing": thresholds.points(curve)})
  found = thresholds.read(tmp_path / "t")
  assert list(found.returned) == [900, 60]
  with pytest.raises(ValueError, match=r"no threshold has precision 1 on d test \(300 captions"):
    found.at_precision(1.0)


def test_default_is_the_best_f1(curve, path):
  best = thresholds.best_f1(curve)
  assert thresholds.read(path).default == pytest.approx(best.precision, abs=0.01)


def test_truth_is_preferred(curve, path):
  low = precision_recall.Curve(np.float32([0.5]), np.array([30]), np.array([60]), 30, 900)
  curves = {"pairing": thresholds.points(curve), "truth": thresholds.points(low)}
  thresholds.write(path, ABOUT, [], curves)
  found = thresholds.read(path)
  assert found.relevance == "truth" and list(found.threshold) == [-1, 0.5]
  assert found.at_precision(0.5) == 0.5


@pytest.mark.parametrize(
  "break_it",
  [
    lambda c: c.pop("curves"),
    lambda c: c["curves"]["pairing"]["recall"].pop(),
    lambda c: c["curves"]["pairing"]["threshold"].reverse(),
    lambda c: c.pop("model"),
    lambda c: c["curves"].clear(),
  ],
)
def test_a_broken_file_is_named(path, break_it):
  content = json.loads(path.read_text())
  break_it(content)
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match=r"thresholds.json is no thresholds.json that this version"):
    thresholds.read(path)


def test_only_of_this_model(path):
  assert thresholds.of_model(path.parent, "abc").about["dataset"] == "d"
  assert thresholds.of_model(path.parent, "other") is None
  assert thresholds.of_model(path.parent / "nowhere", "abc") is None
