"""What a condition is once it is read: comparisons of known values, joined by and, or.

Each gives the rows of an Arrow table that match, and the same as an expression of Milvus, which is
written from the tree, so that no text of a filter can become a part of it that is not a literal.
"""

import dataclasses
import functools
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NEGATIVE = ("date", "year")  # columns where −1 means missing
OPPOSITE = {"==": "!=", "<": ">=", ">": "<=", "in": "not in", "like": "not like"}
OPPOSITE |= {after: before for before, after in OPPOSITE.items()}
_TILE, _FEW = 1 << 16, 64  # names that are made texts at once
COMPARE = {"==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal}
COMPARE |= {">": pc.greater, ">=": pc.greater_equal}


class Condition:
  """Equal conditions are equal and hashable, so that masks can be cached."""

  def mask(self, table) -> np.ndarray:
    """An Arrow table of N images -> bool [N]."""
    raise NotImplementedError

  def milvus(self, fields=None) -> str:
    """An expression of Milvus.

    `fields` gives {column: (how it is written, how to ask that it is not missing)} for columns that
    are not fields of their own name or may be missing.
    """
    raise NotImplementedError

  def opposite(self) -> "Condition":
    raise NotImplementedError

  def names(self) -> frozenset[str]:
    """Columns that are looked at."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Joined(Condition):
  how: str  # and, or
  parts: tuple[Condition, ...]

  def mask(self, table):
    join = np.logical_and if self.how == "and" else np.logical_or
    return functools.reduce(join, (part.mask(table) for part in self.parts))

  def milvus(self, fields=None):
    return f" {self.how} ".join(f"({part.milvus(fields)})" for part in self.parts)

  def opposite(self):
    how = {"and": "or", "or": "and"}[self.how]
    return Joined(how, tuple(part.opposite() for part in self.parts))

  def names(self):
    return frozenset().union(*(part.names() for part in self.parts))


@dataclasses.dataclass(frozen=True)
class Test(Condition):
  column: str
  op: str
  value: str | int | float | tuple  # `in`: of such values; `like`: texts with anything between

  def mask(self, table):
    column = table[self.column]
    if _is_bytes(column.type):
      column = shown(column)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return np.concatenate([np.zeros(0, bool), *map(self._chunk, chunks)])

  def _chunk(self, values):
    if pa.types.is_dictionary(values.type):
      found = np.append(self._known(values.dictionary), False)
      return found[np.asarray(pc.fill_null(values.indices.cast(pa.int64()), -1))]
    return self._known(values)

  def _known(self, values):
    if pa.types.is_null(values.type):
      return np.zeros(len(values), bool)
    if _is_bytes(values.type):  # of a dictionary
      values = _shown(values)
    missing = pc.is_null(values, nan_is_null=True)
    if self.column in NEGATIVE:
      missing = pc.or_kleene(missing, pc.less(values, 0))
    found = pc.and_not(pc.fill_null(self._found(values), False), pc.fill_null(missing, True))
    return np.asarray(found)

  def _found(self, values):
    if self.op in COMPARE:
      return COMPARE[self.op](values, pa.scalar(self.value, values.type))
    if self.op.endswith("in"):
      found = pc.is_in(values, value_set=pa.array(self.value, values.type))
    else:
      found = _like(values, self.value)
    return pc.invert(found) if self.op.startswith("not") else found

  def milvus(self, fields=None):
    name, known = (fields or {}).get(self.column, (self.column, ""))
    if self.column in NEGATIVE:
      known = f"{name} >= 0"
    if self.op in COMPARE:
      said = f"{name} {self.op} {_literal(self.value)}"
    elif self.op.endswith("in"):  # dynamic fields know no `in`
      op, join = ("!=", "and") if self.op == "not in" else ("==", "or")
      one = (f"{name} {op} {_literal(value)}" for value in self.value)
      said = (
        f"({f' {join} '.join(one)})" if "$" in name else f"{name} {self.op} {_list(self.value)}"
      )
    else:
      said = _milvus_like(name, self.value)
      said = f"not ({said})" if self.op == "not like" else said
    return f"{known} and {said}" if known else said

  def opposite(self):
    return Test(self.column, OPPOSITE[self.op], self.value)

  def names(self):
    return frozenset([self.column])


def _is_bytes(kind):
  return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def shown(names) -> pa.ChunkedArray:
  """A column of bytes -> texts, as people see them. What is UTF-8 is not copied."""
  chunks = names.chunks if isinstance(names, pa.ChunkedArray) else [names]
  tiles = (chunk.slice(i, _TILE) for chunk in chunks for i in range(0, len(chunk), _TILE))
  return pa.chunked_array(map(_shown, tiles), pa.string())


def _shown(names):
  """What is not UTF-8 is replaced: in Python, hence only near where such names are."""
  try:
    return names.cast(pa.string())
  except pa.ArrowInvalid:
    if len(names) > _FEW:
      half = len(names) // 2
      return pa.concat_arrays([_shown(names.slice(0, half)), _shown(names.slice(half))])
    texts = (x if x is None else x.decode("utf-8", "replace") for x in names.to_pylist())
    return pa.array(texts, pa.string())


def _like(values, pieces):
  """A prefix, suffix or part is found without a regular expression, several times as fast."""
  if len(pieces) == 1:
    return pc.equal(values, pa.scalar(pieces[0], values.type))
  first, *inner, last = pieces
  if not any(inner) and not (first and last):
    return pc.starts_with(values, first) if first else pc.ends_with(values, last)
  if len(inner) == 1 and not first and not last:
    return pc.match_substring(values, inner[0])
  return pc.match_substring_regex(values, rf"(?s)\A{'.*'.join(map(_quoted, pieces))}\z")


def _quoted(text):
  """For RE2: \\Q…\\E would end at an \\E of the text."""
  return "".join(c if c.isalnum() or ord(c) > 127 else rf"\x{ord(c):02x}" for c in text)


def _literal(value):
  """As Milvus reads it. JSON's escapes are among those that it knows, except \\b, \\f and \\u."""
  if not isinstance(value, str):
    return repr(value)
  escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
  return f'"{"".join(escapes.get(c, c) for c in value)}"'


def _list(values):
  return f"[{', '.join(map(_literal, values))}]"


def _milvus_like(name, pieces):
  """`like` with % for any text. A prefix is a range where it has backslashes, as Arrow, by which
  milvus-lite compares, takes two of them for two."""
  prefix, *rest = pieces
  if rest == [""] and "\\" in prefix:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return f"{name} >= {_literal(prefix)} and {name} < {_literal(end)}"
  escaped = (re.sub(r"([\\%_])", r"\\\1", piece) for piece in pieces)
  return f"{name} like {_literal('%'.join(escaped))}"
