"""The bank: against plain products, and its file."""

import types

import numpy as np
import pytest

from xe_retrieval.calibration import bank as banks

WIDTH, DIM = 16, 8


def unit(x):
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


class Source:
  """Records of two captions each."""

  def __len__(self):
    return 60

  def captions(self):
    return [[f"caption {i}", f"another caption {i}"] for i in range(60)]


@pytest.fixture(scope="module")
def made():
  """The bank of 50 captions and images of 120 and 60, and all captions' features."""
  random = np.random.default_rng(0)
  features = (3 + random.standard_normal((120, WIDTH))).astype(np.float32)
  images = unit(random.standard_normal((60, DIM)))
  encoder = types.SimpleNamespace(fingerprint=lambda: "abc", project_images=lambda x: x)
  return banks.make(encoder, Source(), {"text": features, "image": images}, size=50), features


@pytest.fixture(scope="module")
def asked():
  random = np.random.default_rng(1)
  features = (3 + random.standard_normal((7, WIDTH))).astype(np.float32)
  return unit(random.standard_normal((7, DIM))), features


def test_captions_and_images_are_chosen_once_and_for_all(made):
  bank, features = made
  assert len(bank.captions) == len(bank.features) == len(bank.images) == 50
  assert len(set(bank.captions)) == 50
  all_captions = [c for record in Source().captions() for c in record]
  rows = [all_captions.index(c) for c in bank.captions]
  np.testing.assert_allclose(bank.centre, features[rows].mean(axis=0), rtol=1e-6)
  expected = unit(features[rows] - features[rows].mean(axis=0))
  np.testing.assert_allclose(bank.features, expected, atol=1e-3)


def test_level_is_mean_and_deviation_of_all_scores(made, asked):
  bank, (text, _) = made[0], asked
  mean, deviation = bank.level(text)
  scores = text.astype(np.float64) @ bank.images.T.astype(np.float64)
  np.testing.assert_allclose(mean, scores.mean(axis=1), atol=1e-7)
  np.testing.assert_allclose(deviation, scores.std(axis=1), atol=1e-6)


def test_familiarity_is_the_mean_cosine_of_the_ten_nearest(made, asked):
  bank, (_, features) = made[0], asked
  cosines = unit(features - bank.centre) @ bank.features.T
  expected = -np.sort(-cosines, axis=1)[:, :10].mean(axis=1)
  np.testing.assert_allclose(bank.familiarity(features), expected, atol=1e-6)


def test_what_is_like_many_captions_is_familiar():
  random = np.random.default_rng(2)
  known = unit(np.repeat(random.standard_normal((4, WIDTH)), 12, axis=0))
  bank = banks.Bank("abc", [""] * 48, np.zeros(WIDTH, np.float32), known, known)
  np.testing.assert_allclose(bank.familiarity(5 * known), 1, atol=1e-6)
  far = np.linalg.svd(known)[2][-3:].astype(np.float32)  # orthogonal to all
  np.testing.assert_allclose(bank.familiarity(far), 0, atol=1e-6)


def test_nearest_captions_are_suggested_without_repetitions(made):
  bank, features = made
  row = [c for record in Source().captions() for c in record].index(bank.captions[7])
  assert bank.nearest(features[row : row + 1], 2)[0][0] == bank.captions[7]
  same = banks.Bank("", ["a", "a", "b"], bank.centre, bank.features[:3], bank.images)
  assert [sorted(found) for found in same.nearest(features[:4])] == [["a", "b"]] * 4


def test_file_gives_the_same_numbers(made, asked, tmp_path):
  bank, (text, features) = made[0], asked
  bank.write(tmp_path / banks.NAME)
  again = banks.read(tmp_path, "abc")
  assert again.captions == bank.captions and again.model == "abc"
  np.testing.assert_array_equal(again.level(text), bank.level(text))
  np.testing.assert_array_equal(again.familiarity(features), bank.familiarity(features))
  assert [p.name for p in tmp_path.iterdir()] == [banks.NAME]


def test_only_of_this_model(made, tmp_path):
  assert banks.read(tmp_path, "abc") is None
  made[0].write(tmp_path / banks.NAME)
  assert banks.read(tmp_path, "other") is None


@pytest.mark.parametrize(
  "damage", [lambda b: b[: len(b) // 2], lambda b: b"no archive", lambda b: b""]
)
def test_a_damaged_file_is_named(made, tmp_path, damage):
  path = tmp_path / banks.NAME
  made[0].write(path)
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(ValueError, match="bank.npz is damaged"):
    banks.read(tmp_path, "abc")
