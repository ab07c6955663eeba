"""What lies between search and where vectors lie: images by id, with what is known of each.

An id is a uint64, a hash of source and name; the API shows it as 16 hexadecimal digits. Scores are
inner products of vectors of `bank.Scoring.width` dimensions. `where` is a condition (see
conditions.py), or None for all images; equal conditions are equal and hashable.
"""

from typing import Protocol

import numpy as np
import pyarrow as pa

# Columns that every image has. Of those without a date, `date` and `year` are −1, which conditions
# take for missing; missing values of other columns are null.
OWN = {
  "source": pa.string(),  # the label of the source: photos
  "folder": pa.string(),  # with the label before it: photos/2019/june
  "name": pa.binary(),  # in the source, as the file system has it: any bytes but 0
  "date": pa.int64(),  # last change of the file, in nanoseconds since 1970
  "year": pa.int64(),  # of the date, UTC
  "stamp_size": pa.int64(),  # two numbers that change if the picture does
  "stamp_time": pa.int64(),
}
# What conditions may name of these, and its type; columns of tables have one of these types too.
NAMED = {"source": "text", "folder": "text", "name": "text", "date": "date", "year": "whole"}
TYPES = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64()}


class Unavailable(ValueError):
  """An engine that does not answer, or refuses to; the message says which and why."""


class Store(Protocol):
  """Subclass it: the methods that have a body here serve any engine."""

  columns: dict[str, str]  # what conditions may name -> text, whole, number or date
  approximate: bool  # whether `nearest` may miss some of the nearest, unless `exact`
  stale = False  # opened to write to, and not as the manifest says: commit, and replace that

  def __len__(self) -> int:
    """How many images there are."""

  # ---- reading ----

  def nearest(self, queries, k, where=None, exact=False) -> tuple[np.ndarray, np.ndarray]:
    """float32 [Q, width] -> ids uint64 [Q, k'], scores float32 [Q, k'], best first.

    k' is min(k, images that match), or less where an engine cannot list that many. Equal scores
    come in an order that does not change. Where an approximate index finds less for one query than
    for another, what is missing has the score −inf.
    """

  def above(self, queries, least, where=None) -> list[np.ndarray | None]:
    """Scores that are at least least[q], float32 in any order, of each query; None: too many for
    the engine to list. Exact."""

  def count(self, queries, least, where=None) -> list[int | None]:
    """How many scores are at least least[q]; None: the engine cannot count that many."""
    found = self.above(queries, least, where)
    return [None if scores is None else len(scores) for scores in found]

  def scan(self, queries, k, least, where=None, exact=False, listed=False):
    """`nearest`, and third what `above` says, or None where only an approximate index was asked.
    Unless `listed`, an engine may say no more than how many those scores are, after the best.

    Engines that look at every vector anyway answer both in one pass.
    """
    above = None if self.approximate and not exact else self.above(queries, least, where)
    return *self.nearest(queries, k, where, exact), above

  def histogram(self, queries, grid) -> np.ndarray | None:
    """How many images reach each score of `grid` [G], ascending: int64 [Q, G].

    None: the engine cannot look at all images.
    """
    return None

  def matching(self, where) -> int:
    """How many images match."""

  def any_matches(self, where) -> bool:
    """Engines know this sooner than how many."""
    return self.matching(where) > 0

  def has(self, ids) -> np.ndarray:
    """uint64 [n] -> bool [n]."""

  def fetch(self, ids, columns) -> dict[str, list | np.ndarray]:
    """Of images that are there: {column: its values [n]}, None where missing."""

  def vectors(self, ids) -> np.ndarray:
    """Of images that are there: uint64 [n] -> float32 [n, width]."""

  # ---- writing: nothing is seen by readers before the manifest is replaced after `commit` ----

  def known(self, source) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a source, uint64 [n] ascending, and their stamps, int64 [n, 2]."""

  def add(self, ids, vectors, columns) -> None:
    """Images that are not there, or were removed: uint64 [n], float32 [n, width], and
    {column: pyarrow array [n]} with the OWN columns and others."""

  def remove(self, ids) -> None:
    """Images that are there; those of them that are added again are replaced."""

  def commit(self, queries=None) -> dict:
    """Makes all of it safe -> what the manifest says under "store", by which `stores.open` finds
    it. `queries()` is float32 [q, width], a sample of what will be asked to tune an index by, or
    None."""

  def swept(self, before: dict) -> None:
    """The manifest has been replaced: what only older generations need may go. `before` is what
    the one before said under "store", which readers may still be opening."""
