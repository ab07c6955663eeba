"""The bank: against plain products, and its file."""

import dataclasses
import types

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image
from scipy import special

from xe_retrieval import prepare
from xe_retrieval.data import pipeline
from xe_retrieval.preparation import records
from xe_retrieval.towers import bank as banks

WIDTH, DIM = 16, 8


def unit(x):
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """60 images of two captions each, all different, prepared from a table."""
  root = tmp_path_factory.mktemp("bank")
  rows = ["image\tcaption\tsplit"]
  for i in range(60):
    Image.new("RGB", (8, 8), (i, 2 * i, 7)).save(root / f"{i}.png")
    rows += [f"{i}.png\t{kind} {i}\ttrain" for kind in ("caption", "another caption")]
  (root / "t.tsv").write_text("\n".join(rows))
  job = prepare.table(str(root / "t.tsv"), str(root))
  prepare.prepare(job, str(root / "out"), records.Options())
  return pipeline.Source("captions/t", str(root / "out"), "train")


@pytest.fixture(scope="module")
def made(source):
  """The bank of 50 captions and images of 120 and 60, and all captions' features."""
  random = np.random.default_rng(0)
  features = (3 + random.standard_normal((120, WIDTH))).astype(np.float32)
  images = unit(random.standard_normal((60, DIM)))
  project = unit(random.standard_normal((WIDTH, DIM)).T).T
  encoder = types.SimpleNamespace(
    fingerprint=lambda: "abc",
    variables={},
    project_images=lambda x: x,
    project_text=lambda x: unit(x @ project),
  )
  return banks.make(encoder, source, {"text": features, "image": images}, size=50), features


@pytest.fixture(scope="module")
def asked():
  random = np.random.default_rng(1)
  features = (3 + random.standard_normal((7, WIDTH))).astype(np.float32)
  return unit(random.standard_normal((7, DIM))), features


def test_captions_and_images_are_chosen_once_and_for_all(made, source):
  bank, features = made
  assert len(bank.captions) == len(bank.features) == len(bank.images) == 50
  assert len(set(bank.captions)) == 50
  all_captions = list(source.captions().flat)
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
  bank = banks.Bank("abc", [""] * 48, np.zeros(WIDTH, np.float32), known, known, known, 0.5)
  np.testing.assert_allclose(bank.familiarity(5 * known), 1, atol=1e-6)
  far = np.linalg.svd(known)[2][-3:].astype(np.float32)  # orthogonal to all
  np.testing.assert_allclose(bank.familiarity(far), 0, atol=1e-6)


def test_nearest_captions_are_suggested_without_repetitions(made, source):
  bank, features = made
  row = list(source.captions().flat).index(bank.captions[7])
  assert bank.nearest(features[row : row + 1], 2)[0][0] == bank.captions[7]
  same = banks.Bank(
    "", ["m mm", "a cat", "a cat"], bank.centre, bank.features[:3], bank.texts[:3], bank.images, 0.5
  )
  assert same.nearest(features[:4]) == [["a cat", "m mm"]] * 4


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


# ---- scores that are corrected by the bank ----


def scoring(bank, query=0.0, image=0.0, familiarity=0.0, scale=0.0):
  fields = {"query": query, "image": image, "familiarity": familiarity, "scale": scale}
  config = ConfigDict({"embedding_dim": DIM, "scale": 20.0, "bank": fields})
  return banks.Scoring(config, bank)


def usual(x, others, scale):
  x, others = x.astype(np.float64), others.astype(np.float64)
  return (special.logsumexp(scale * x @ others.T, axis=1) - np.log(len(others))) / scale


@pytest.mark.parametrize("scale", [0.0, 7.0, 400.0])
def test_score_is_less_what_is_usual_of_caption_and_image(made, asked, scale):
  bank, (text, features) = made[0], asked
  image = unit(np.random.default_rng(5).standard_normal((9, DIM)))
  bank = dataclasses.replace(bank, usual=float(np.median(bank.familiarity(features))))
  use = scoring(bank, 0.5, 0.75, 2.0, scale)
  found = use.text(text, features) @ use.image(image).T
  a, b = usual(text, bank.images, scale or 20.0), usual(image, bank.texts, scale or 20.0)
  rare = np.minimum(0, bank.familiarity(features) - bank.usual)
  assert 0 < np.count_nonzero(rare) < len(rare)
  expected = text @ image.T - 0.5 * a[:, None] - 0.75 * b + 2 * rare[:, None]
  np.testing.assert_allclose(found, expected, atol=2e-6)
  assert use.image(image).shape[1] == use.width == DIM + 2


def test_images_among_each_other_have_cosines(made):
  use = scoring(made[0], 0.5, 0.5)
  image = unit(np.random.default_rng(5).standard_normal((9, DIM)))
  vectors = use.image(image)
  np.testing.assert_allclose(use.plain(vectors) @ vectors.T, image @ image.T, atol=1e-6)
  assert (vectors[:, DIM] != 0).all()  # not in place


def test_without_a_correction_vectors_stay_as_they_are(made, asked):
  use = scoring(None)
  assert use.text(*asked) is asked[0] and use.image(asked[0]) is asked[0] and use.width == DIM
  assert banks.correction(ConfigDict({"scale": 20.0})) is None  # a config of an earlier version


def test_a_missing_bank_is_named(asked):
  with pytest.raises(ValueError, match="evaluate --workdir=… makes it"):
    scoring(None, query=0.5).text(*asked)


def test_three_quarters_of_the_captions_are_as_familiar_as_usual(made, source):
  """Among captions of other images: siblings of a caption would make it too familiar."""
  bank, features = made
  captions = list(source.captions().flat)
  rows = np.array([captions.index(c) for c in bank.captions])
  cosines = bank.features @ bank.features.T
  cosines[rows[:, None] // 2 == rows // 2] = -1
  near = -np.sort(-cosines, axis=1)[:, :10].mean(axis=1)
  np.testing.assert_allclose(bank.usual, np.quantile(near, 0.25), atol=1e-3)
