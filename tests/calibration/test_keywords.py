"""Queries of a few words: which ones are, what is relevant to them, what is known of them."""

import dataclasses

import numpy as np
import pytest

from xe_retrieval.calibration import artifact, keywords, promises
from xe_retrieval.calibration.calibrator import Calibrator
from xe_retrieval.evaluation.embedded import Images, Pairs
from xe_retrieval.towers.bank import Bank

CAPTIONS = [
  "A brown dog is running on the beach.",
  "Two dogs run through the snow",
  "A large red car",
  "A man climbs a large rock",
]
DIRECTIONS = np.eye(4, dtype=np.float32)


@pytest.fixture(scope="module")
def bank():
  """Captions 0 and 1 look alike; so do 2 and 3."""
  texts = DIRECTIONS[[0, 0, 1, 1]] + 0.1 * DIRECTIONS
  texts /= np.linalg.norm(texts, axis=1, keepdims=True)
  return Bank("m", CAPTIONS, DIRECTIONS[0], texts, texts, DIRECTIONS, 0.5)


@pytest.mark.parametrize(
  ("query", "known"),
  [
    ("dog", True),
    ("Dogs running", True),  # by their stems
    ("a red car", True),
    ("red, car!", True),
    ("a dog on beach", False),  # four words
    ("quarterly report", False),
    ("red invoice", False),
    ("the", False),
    ("two of the", False),  # nothing that is said of an image
    ("", False),
    ("犬", False),
  ],
)
def test_a_few_known_words(bank, query, known):
  assert keywords.Vocabulary(bank).knows(query) == known


def test_a_stranger_has_no_known_word(bank):
  several = dataclasses.replace(bank, captions=[*CAPTIONS, "A dog and a car", "A man runs"])
  vocabulary = keywords.Vocabulary(several)
  strange = ["dog", "a dog reads the quarterly report", "quarterly report", "the", "ein hund läuft"]
  assert [vocabulary.strange(query) for query in strange] == [False, False, True, True, True]
  known = artifact.Calibration({}, [], several).queries(
    strange, DIRECTIONS[[0] * 5], several.features[[0] * 5]
  )
  assert np.isneginf(known.familiarity).tolist() == [False, False, True, True, True]
  # Captions without spaces have no word in common: there it says nothing.
  apart = dataclasses.replace(bank, captions=["犬が走る", "赤い車", "猫が寝ている", "二人の子供"])
  assert not keywords.Vocabulary(apart).strange("quarterly report")


def test_how_usual_words_are_and_whether_they_find_their_captions(bank):
  vocabulary = keywords.Vocabulary(bank)
  queries = ["dog", "large", "dog car"]
  known = vocabulary.describe(queries, DIRECTIONS[[0, 0, 0]])
  np.testing.assert_allclose(np.exp(known.familiarity), [2.5 / 4, 2.5 / 4, 0.5 / 4])
  # Of the two captions nearest to the first direction both have dogs, and none says large.
  np.testing.assert_allclose(known.level, [2 / 3, 0, -1])


def test_an_image_is_relevant_if_its_captions_have_all_words():
  images = Images(np.zeros((3, 4), np.float32), [CAPTIONS[:2], CAPTIONS[2:3], CAPTIONS[3:]])
  others = Images(np.zeros((1, 4), np.float32), [["red dogs"]])
  unknown = Images(np.zeros((1, 4), np.float32))
  found = keywords.relevance(["dog snow", "large", "red"], [images, others, unknown])
  assert found.parts == 2 and found.name == keywords.NAME
  rows = np.array([0, 1, 2])
  assert found.matrix(rows, 0).tolist() == [
    [True, False, False],  # dog and snow are in one caption, and in both
    [False, True, True],
    [False, True, False],
  ]
  assert found.matrix(rows[::-1], 1).tolist() == [[True], [False], [False]]


def test_queries_are_words_of_captions_each_once_and_the_same_in_every_run(bank):
  vocabulary = keywords.Vocabulary(bank)
  captions, images = CAPTIONS * 5, np.arange(20) % 4
  queries, owners = keywords.draw(captions, images, vocabulary)
  assert len(set(queries)) == len(queries) > 5
  assert {len(query.split()) for query in queries} == {1, 2, 3}
  relevant = keywords.relevance(queries, [Images(np.zeros((4, 4)), [[c] for c in CAPTIONS])])
  assert relevant.matrix(relevant.queries, 0)[relevant.queries, owners].all()
  again, _ = keywords.draw(captions, images, vocabulary)
  assert again == queries
  assert keywords.draw(captions, images, vocabulary, count=3)[0] == queries[:3]


@pytest.fixture(scope="module")
def world():
  """Images show some of 30 things, a few of which cannot be seen; calibrated on one half."""
  random = np.random.default_rng(0)
  things = np.array([f"thing{a}{b}" for a in "abcdef" for b in "vwxyz"])
  often = np.geomspace(0.3, 0.01, 30)
  looks = random.standard_normal((30, 32)) * np.where(np.arange(30) % 5, 1, 0.05)[:, None]

  def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

  def embed(shown):
    return unit(shown @ looks + 0.8 * random.standard_normal((len(shown), 32)))

  def images(count):
    shown = random.random((count, 30)) < often
    captions = [" ".join(random.permutation(things[row])) for row in shown]
    return shown, Images(embed(shown), [[caption] for caption in captions])

  shown, known = images(2000)
  captions = [caption for (caption,) in known.captions]
  text = embed(shown)
  bank = Bank("m", captions, text[0], text, text, known.vectors, 0.5)
  vocabulary = keywords.Vocabulary(bank)

  def pairs():
    _, gallery = images(400)
    captions = [caption for (caption,) in gallery.captions]
    queries, owners = keywords.draw(captions * 3, np.tile(np.arange(400), 3), vocabulary)
    asked = np.array([[thing in query.split() for thing in things] for query in queries])
    return Pairs(embed(asked), gallery, owners, queries, None)

  first, second = pairs(), pairs()
  everything = dataclasses.replace(first, features=first.text)
  return artifact.make(everything, [first.images], [], bank, {"model": "m"}, words=first), second


def test_what_a_word_finds_and_how_usual_it_is_make_the_probability_true(world):
  calibration, pairs = world
  source = keywords.relevance(pairs.captions, [pairs.images])
  found = promises.shown_probability(calibration, pairs, [pairs.images], [source])["words"]
  alike = dataclasses.replace(calibration, words=_knowing_nothing(calibration.words))
  without = promises.shown_probability(alike, pairs, [pairs.images], [source])["words"]
  assert found["ece"] < 0.04 and found["brier"] < without["brier"] - 0.01
  (half,) = [
    row
    for row in promises.judge(calibration, pairs, [pairs.images], [source])
    if row["target"] == 0.5 and not row["guarantee"]
  ]
  assert half["kept"] == pytest.approx(0.5, abs=0.08) and half["pairs"] > 200


def _knowing_nothing(meaning):
  """Of all curves, that of the group in the middle."""
  curve = meaning.calibrator.curves[len(meaning.calibrator.curves) // 2]
  return dataclasses.replace(meaning, calibrator=Calibrator(np.array([]), [curve], np.array([])))


def test_words_are_kept_in_the_file(world, tmp_path):
  calibration, pairs = world
  of_captions = dataclasses.replace(calibration.words, relevance="pairing")
  about = {"model": "m", "dataset": "d", "split": "s", "queries": 1, "images": 1}
  whole = dataclasses.replace(calibration, about=about, meanings=[of_captions])
  whole.write(tmp_path)
  again = artifact.read(tmp_path, "m")
  assert [m.relevance for m in again.meanings] == ["pairing"] and again.words.relevance == "words"
  queries = again.vocabulary.describe(pairs.captions, pairs.text)
  before = calibration.vocabulary.describe(pairs.captions, pairs.text)
  np.testing.assert_array_equal(queries.familiarity, before.familiarity)
  assert again.words.cut(100, min_precision=0.5) == calibration.words.cut(100, min_precision=0.5)
