"""Queries of a few words, as people type them: dog, red car.

What a score means for captions, which are sentences, says little about single words: "dog" is true
of many images, and no caption says just that. So words of captions are asked as well, and an image
is relevant if its captions have all of them. What is known of such a query beside its scores is how
many captions of the bank have its words, and how well it finds these among the others: "dog" does,
"large" does not.

And a query of any length without a single known word is a stranger, whatever a text tower makes of
it.
"""

import functools
import re

import numpy as np
import snowballstemmer

from xe_retrieval.calibration.calibrator import RARE, Queries
from xe_retrieval.evaluation.relevance import Relevance

NAME = "words"  # this source of relevance, see relevance.MEANING
MOST = 3  # words in such a query
COUNT = 2_000  # queries made of a split, at most
FEWEST = 200  # fewer say too little

_WORD = re.compile(r"[^\W_]+")
_FUNCTION = """\
a about above across after against all along among an and another any are around as at away back
be been before behind being below beneath beside between both but by can could do does down each
for from front has have having he her him his how i in inside into is it its like many more most
near next no not of off on one onto or other out outside over past s several she some t than that
the their them then there these they this those through to together toward towards two under up
upon very was we were what when where which while who whose will with within without you your"""
_SAY_NOTHING = frozenset(_FUNCTION.split())
_stemmer = snowballstemmer.stemmer("english")


class Vocabulary:
  """The words that a model knows, by their stems: those of its bank's captions."""

  def __init__(self, bank):
    self._bank, self._rows = bank, {}  # stem -> captions that have it
    for row, caption in enumerate(bank.captions):
      for stem in _stems(caption):
        self._rows.setdefault(stem, set()).add(row)

  def strange(self, query: str) -> bool:
    """Whether not one of its words is known; never, where words are no guide."""
    return self._are_a_guide and not _stems(query) & self._rows.keys()

  @functools.cached_property
  def _are_a_guide(self):
    """Not in languages without spaces, for instance: there, captions share no words."""
    often = {stem for stem, rows in self._rows.items() if len(rows) > 1}
    alone = sum(not _stems(caption) & often for caption in self._bank.captions)
    return alone <= RARE * len(self._bank.captions)

  def knows(self, query: str) -> bool:
    """Whether a query is at most MOST words, and all of them known ones."""
    asked = _stems(query)
    return len(_WORD.findall(query)) <= MOST and bool(asked) and asked <= self._rows.keys()

  def describe(self, queries: list[str], text) -> Queries:
    """With their vectors float32 [Q, ≥ D].

    In place of the familiarity, the log share of captions that have all words; in place of the
    level, how many of as many captions nearest to the query have them.
    """
    texts = self._bank.texts  # [C, D]
    share, found = np.empty((2, len(queries)))
    for q, query in enumerate(queries):
      having = set.intersection(*(self._rows[stem] for stem in _stems(query)))
      share[q] = np.log((len(having) + 0.5) / len(texts))
      found[q] = -1
      if having:
        cosines = texts @ text[q, : texts.shape[1]]
        nearest = np.argpartition(-cosines, len(having) - 1)[: len(having)]
        found[q] = len(having.intersection(nearest.tolist())) / (len(having) + 1)
    return Queries(found, self._bank.level(text)[1], share)


def draw(captions, image_of_caption, known: Vocabulary, count: int = COUNT):
  """Different queries of neighbouring words of captions -> list [Q], the images they are of [Q]."""
  draws = np.random.default_rng(0)
  found = {}
  for row in draws.permutation(len(captions)):
    words = _content(captions[row])
    many = int(draws.integers(1, MOST + 1))
    start = int(draws.integers(0, max(len(words) - many, 0) + 1))
    query = " ".join(words[start : start + many])
    if known.knows(query):
      found.setdefault(query, image_of_caption[row])
    if len(found) == count:
      break
  return list(found), np.fromiter(found.values(), np.int64, len(found))


def relevance(queries, gallery) -> Relevance:
  """By the captions of the leading parts of a gallery [Images] that have any."""
  asked = [_stems(query) for query in queries]
  wanted = set().union(*asked)
  known = next((i for i, part in enumerate(gallery) if part.captions is None), len(gallery))
  having = [_having(part.captions, wanted) for part in gallery[:known]]

  def matrix(rows, part):
    out = np.ones((len(rows), len(gallery[part].vectors)), bool)
    for i, q in enumerate(rows):
      for stem in asked[q]:
        out[i] &= having[part][stem]
    return out

  return Relevance(NAME, matrix, np.arange(len(queries)), known)


def _having(captions, wanted):
  """{stem: bool [M], images with a caption that has it}."""
  having = {stem: np.zeros(len(captions), bool) for stem in wanted}
  for m, texts in enumerate(captions):
    for stem in wanted.intersection(_stems(" ".join(texts))):
      having[stem][m] = True
  return having


def _stems(text):
  return set(map(_stem, _content(text)))


@functools.lru_cache(100_000)  # words; captions repeat them
def _stem(word):
  return _stemmer.stemWord(word)


def _content(text):
  return [word for word in _WORD.findall(text.lower()) if word not in _SAY_NOTHING]
