"""Queries of a few words: which ones are, what is relevant to them, what is known of them."""

import numpy as np
import pytest

from xe_retrieval.calibration import keywords
from xe_retrieval.evaluation.embedded import Images
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
