r"""Conditions on what is known of images: source == "holiday" and year > 2020.

    condition = parse('folder like "photos/%" and not year in [2019, 2020]', store.columns)
    condition.mask(table)  # bool [N] for an Arrow table
    condition.milvus()     # the same as an expression of Milvus

Comparisons are == != < <= > >=, `in [a, b]` and `like "a%"`, where % stands for any text and \% for
itself; they are joined by and, or, not and parentheses. A date is compared with a day, as in
"2020-06-01". A column whose name is no identifier is written `in backticks`.

A missing value matches nothing, under `not` neither. Engines differ there, so `not` is carried down
to the comparisons, and what is left are comparisons of known values joined by and, or.
"""

import datetime
import math
import re

from xe_retrieval.search.stores.condition_tree import COMPARE, Condition, Joined, Test

LONGEST = 1_000  # characters of a filter
MOST = 16  # comparisons, each of which looks at all images
DEEPEST = 50  # parentheses and nots in each other
DAY = 86_400 * 10**9  # nanoseconds
EPOCH = datetime.date(1970, 1, 1)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\", "%": "%"}
TOKEN = re.compile(
  r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  |(?P<number>-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?!\w))
  |(?P<name>[^\W\d]\w*|`[^`]+`)
  |(?P<sign>==|!=|<=|>=|[<>()\[\],])""",
  re.VERBOSE | re.DOTALL,
)
SPACE = re.compile(r"\s*")


def all_of(*conditions) -> Condition | None:
  """None among them, or nothing at all, is no condition."""
  parts = []
  for one in filter(None, conditions):
    parts += one.parts if isinstance(one, Joined) and one.how == "and" else [one]
  return parts[0] if len(parts) == 1 else Joined("and", tuple(parts)) if parts else None


def inside(folder) -> Condition:
  """In this folder or in one under it."""
  folder = folder.rstrip("/")
  parts = Test("folder", "==", folder), Test("folder", "like", (f"{folder}/", ""))
  return Joined("or", parts)


def since(day: datetime.date) -> Condition:
  return Test("date", ">=", _start((day - EPOCH).days))


def until(day: datetime.date) -> Condition:
  """This day included."""
  return Test("date", "<", _start((day - EPOCH).days + 1))


def parse(text: str, columns: dict[str, str]) -> Condition:
  """`columns` gives their types: text, whole, number or date. ValueError says what is wrong."""
  if len(text) > LONGEST:
    raise ValueError(f"filter: has {len(text):,} characters, at most {LONGEST:,} are read")
  if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
    raise ValueError("filter: is not valid Unicode")
  return _Parser(text, columns).parse()


class _Parser:
  """Recursive descent over tokens (kind, text, where in the filter)."""

  def __init__(self, text, columns):
    self.columns, self.tokens, self.at, self.depth, self.tests = columns, [], 0, 0, 0
    place = SPACE.match(text).end()
    while place < len(text):
      token = TOKEN.match(text, place)
      if not token:
        start = text[place]
        hint = {"=": "; equality is ==", '"': ": no quote ends it", "'": ": no quote ends it"}
        hint |= {"!": "; say not, or !=", "&": "; say and", "|": "; say or"}
        _wrong(place, f"{start!r} is not understood{hint.get(start, '')}")
      self.tokens.append((token.lastgroup, token.group(), place))
      place = SPACE.match(text, token.end()).end()
    self.tokens.append(("end", "", len(text)))

  def parse(self):
    found = self._or()
    kind, text, place = self.tokens[self.at]
    if kind != "end":
      _wrong(place, f"{text!r} comes after a whole condition; join conditions by and, or")
    return found

  def _or(self):
    return self._joined("or", self._and)

  def _and(self):
    return self._joined("and", self._not)

  def _joined(self, how, part):
    parts = [part()]
    while self._word(how):
      parts.append(part())
    return parts[0] if len(parts) == 1 else Joined(how, tuple(parts))

  def _not(self):
    place = self.tokens[self.at][2]
    self.depth += 1
    if self.depth > DEEPEST:
      _wrong(place, f"more than {DEEPEST} parentheses and nots lie in each other")
    if self._word("not"):
      found = self._not().opposite()
    elif self._sign("("):
      found = self._or()
      if not self._sign(")"):
        _wrong(self.tokens[self.at][2], f"the parenthesis of character {place + 1} is not closed")
    else:
      found = self._test()
    self.depth -= 1
    return found

  def _test(self):
    kind, name, place = self._next()
    quoted = kind == "name" and name[0] == "`"
    if kind != "name" or not quoted and name.lower() in ("and", "or", "not", "in", "like"):
      _wrong(place, f"a column should be here{f', not {name}' if name else ''}", self.columns)
    name = name.strip("`")
    if name not in self.columns:
      _wrong(place, f"{name!r} is no column", self.columns)
    negative = self._word("not")
    _, op, place = self._next()
    if (op := op.lower()) not in ("in", "like") and (negative or op not in COMPARE):
      _wrong(
        place, f"after {name} should be == != < <= > >= in or like{f', not {op}' if op else ''}"
      )
    if op == "like":
      if self.columns[name] != "text":
        _wrong(place, f"like is for texts, and {name} is a {self.columns[name]}")
      value = self._text(like=True)
    else:
      value = self._list(name) if op == "in" else self._value(name)
    dates = self.columns[name] == "date"
    self.tests += len(value) if dates and op == "in" else 1
    if self.tests > MOST:
      _wrong(place, f"more than {MOST} comparisons; many values of a text are one: name in [a, b]")
    found = _days(name, op, value) if dates else Test(name, op, value)
    return found.opposite() if negative else found

  def _list(self, name):
    if not self._sign("["):
      _wrong(self.tokens[self.at][2], f"after in should be a list: {name} in [a, b]")
    values = [self._value(name)]
    while self._sign(","):
      values.append(self._value(name))
    if not self._sign("]"):
      _wrong(self.tokens[self.at][2], "the list is not closed by ]")
    return tuple(dict.fromkeys(values))

  def _value(self, name):
    """The next token as a value of this column."""
    kind, text, place = self.tokens[self.at]
    type_ = self.columns[name]
    if kind == "text" and type_ == "text":
      return self._text()
    if kind == "text" and type_ == "date":
      try:
        return (datetime.date.fromisoformat(self._text()) - EPOCH).days
      except ValueError:
        _wrong(place, f'{text} is no day as in "2020-06-01"')
    if kind == "number" and type_ in ("whole", "number"):
      self.at += 1
      value = float(text)
      if type_ == "number" and math.isfinite(value):
        return value
      if type_ == "whole" and re.fullmatch("-?[0-9]{1,19}", text) and abs(int(text)) < 2**63:
        return int(text)
      _wrong(place, f"{text} is no {'whole number' if type_ == 'whole' else 'number'} of 64 bits")
    right = {"text": 'a text "in quotes"', "date": 'a day as in "2020-06-01"'}
    _wrong(
      place, f"{name} is compared with {right.get(type_, 'a number')}, not with {text or 'nothing'}"
    )

  def _text(self, like=False):
    """A text without its quotes; for `like`, what lies between its wildcards."""
    kind, text, place = self._next()
    if kind != "text":
      _wrong(place, 'after like should be a text "in quotes", with % for any text')
    pieces = [""]
    for one in re.finditer(r"\\.|[^\\]", text[1:-1], re.DOTALL):
      escaped = one.group()[0] == "\\"
      if escaped and (one.group()[1] not in ESCAPES or like and one.group()[1] == "\\"):
        known = "like cannot look for backslashes" if like else "a backslash itself is \\\\"
        _wrong(place + 1 + one.start(), f"{one.group()} is not understood; {known}")
      if like and one.group() == "%":
        pieces.append("")
      else:
        pieces[-1] += ESCAPES[one.group()[1]] if escaped else one.group()
    return tuple(pieces) if like else pieces[0]

  def _next(self):
    self.at += 1
    return self.tokens[self.at - 1]

  def _word(self, word):
    return self._take("name", word)

  def _sign(self, sign):
    return self._take("sign", sign)

  def _take(self, kind, text):
    found = self.tokens[self.at][0] == kind and self.tokens[self.at][1].lower() == text
    self.at += found
    return found


def _days(column, op, value):
  """A comparison of a date, in nanoseconds, with whole days."""
  if op == "in":
    return Joined("or", tuple(_days(column, "==", day) for day in value))
  start, end = Test(column, ">=", _start(value)), Test(column, "<", _start(value + 1))
  whole = {"==": Joined("and", (start, end)), ">=": start, "<=": end}
  return whole[op] if op in whole else whole[{"!=": "==", "<": ">=", ">": "<="}[op]].opposite()


def _start(day):
  """In nanoseconds, of which 64 bits reach from 1677 to 2262."""
  return max(-(2**63) + 1, min(day * DAY, 2**63 - 1))


def _wrong(place, what, columns=None):
  known = f"; columns are {', '.join(columns)}" if columns else ""
  raise ValueError(f"filter: character {place + 1}: {what}{known}")
