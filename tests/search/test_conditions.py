"""Filters: by hand, against an obvious evaluator in Python, in Milvus-lite, and hostile ones."""

import datetime
import logging
import random
import re

import numpy as np
import pyarrow as pa
import pytest

from xe_retrieval.search import conditions
from xe_retrieval.search.stores import condition_tree

COLUMNS = {"source": "text", "folder": "text", "name": "text", "date": "date", "year": "whole"}
COLUMNS |= {"tag": "text", "stars": "whole", "price": "number", "my column": "text"}
DAYS = ["2019-12-31", "2020-06-01", "2020-06-02", None]
ODD = [
  "a",
  "a%b",
  "a_b",
  "axb",
  "q\"uo'te",
  "back\\slash",
  "new\nline",
  "ümlaut 日本",
  "x\x00y",
  "",
]
HOUR = 3_600 * 10**9


def _day(text, hours=0):
  day = datetime.date.fromisoformat(text) - datetime.date(1970, 1, 1)
  return day.days * 24 * HOUR + hours * HOUR


def _rows():
  """Every value beside every other at least once; a third of those of tables is missing."""
  picked = random.Random(0)
  rows = []
  for i in range(120):
    day = DAYS[i % 4]
    rows.append(
      {
        "source": ("photos", "holiday")[i % 2],
        "folder": ("photos", "photos/2019", "photos/2019/june", "photos_x", "a\\b/c")[i % 5],
        "name": ODD[i % len(ODD)],
        "date": -1 if day is None else _day(day, picked.randrange(24)),
        "year": -1 if day is None else int(day[:4]),
        "tag": picked.choice([None, *ODD[:8]]),
        "stars": picked.choice([None, -3, 0, 5, 2**62]),
        "price": picked.choice([None, -0.5, 0.0, 2.5, 1e22]),
        "my column": picked.choice([None, "a", "b"]),
      }
    )
  return rows


ROWS = _rows()
TABLE = pa.table(
  {
    "source": pa.array([r["source"] for r in ROWS]).dictionary_encode(),
    "folder": pa.array([r["folder"] for r in ROWS]).dictionary_encode(),
    "name": pa.array([r["name"].encode() for r in ROWS], pa.binary()),
    "tag": pa.array([r["tag"] for r in ROWS]).dictionary_encode(),
    "my column": pa.array([r["my column"] for r in ROWS], pa.string()),
    "price": pa.array([np.nan if r["price"] is None else r["price"] for r in ROWS], pa.float64()),
    **{c: pa.array([r[c] for r in ROWS], pa.int64()) for c in ("date", "year", "stars")},
  }
)


def matching(text):
  return conditions.parse(text, COLUMNS).mask(TABLE)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("n == 1", [1, 0, 0]),
    ("n != 1", [0, 1, 0]),
    ("not n == 1", [0, 1, 0]),
    ("not (n == 1 or t == 'b')", [0, 0, 0]),
    ("not (n == 1 and t == 'b')", [1, 1, 0]),
    ("n < 2", [1, 0, 0]),
    ("n in [2, 7]", [0, 1, 0]),
    ("n not in [2, 7]", [1, 0, 0]),
    ("not not n in [1, 2]", [1, 1, 0]),
    ("t like 'a%'", [1, 0, 0]),
    ("t not like 'a%'", [0, 1, 0]),
    ("t like '%'", [1, 1, 0]),
    ("n == 1 or n == 2 and t == 'a'", [1, 0, 0]),  # `and` binds more strongly
    ("(n == 1 or n == 2) and t == 'b'", [0, 1, 0]),
  ],
)
def test_by_hand(text, expected):
  """The third row knows neither."""
  table = pa.table({"n": pa.array([1, 2, None], pa.int64()), "t": ["a", "b", None]})
  found = conditions.parse(text, {"n": "whole", "t": "text"}).mask(table)
  assert found.dtype == bool and found.tolist() == [bool(x) for x in expected]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ('date == "2020-06-01"', [0, 1, 1, 0, 0]),
    ('date != "2020-06-01"', [1, 0, 0, 1, 0]),
    ('date < "2020-06-01"', [1, 0, 0, 0, 0]),
    ('date <= "2020-06-01"', [1, 1, 1, 0, 0]),
    ('date > "2020-06-01"', [0, 0, 0, 1, 0]),
    ('not date > "2020-06-01"', [1, 1, 1, 0, 0]),
    ('date in ["2020-06-02", "2020-05-31"]', [1, 0, 0, 1, 0]),
    ('date < "9999-01-01"', [1, 1, 1, 1, 0]),
  ],
)
def test_days_by_hand(text, expected):
  """The last second before a day, its first and last, the first after it, and no date."""
  start = _day("2020-06-01")
  dates = [start - 1, start, start + 24 * HOUR - 1, start + 24 * HOUR, -1]
  table = pa.table({"date": pa.array(dates, pa.int64())})
  assert conditions.parse(text, COLUMNS).mask(table).tolist() == [bool(x) for x in expected]


def test_folders_and_days_as_conditions():
  folders = [row["folder"] for row in ROWS]
  inside = conditions.inside("photos/2019/").mask(TABLE)
  assert inside.tolist() == [f in ("photos/2019", "photos/2019/june") for f in folders]
  assert conditions.inside("a\\b").mask(TABLE).tolist() == [f == "a\\b/c" for f in folders]
  day = datetime.date(2020, 6, 1)
  both = conditions.all_of(conditions.since(day), None, conditions.until(day))
  assert (both.mask(TABLE) == matching('date == "2020-06-01"')).all()
  assert conditions.all_of(None) is None and conditions.all_of(both, None) == both
  assert both.names() == {"date"}


def test_equal_conditions_are_equal():
  one, other = (conditions.parse(t, COLUMNS) for t in ("year > 2019", "( year>2019 )"))
  assert one == other and hash(one) == hash(other)
  assert one != conditions.parse("year > 2020", COLUMNS)


def test_bytes_that_are_not_utf8_are_compared_as_shown():
  names = pa.array([b"caf\xe9", "café".encode(), None], pa.binary())
  found = conditions.parse('name == "caf\ufffd"', COLUMNS).mask(pa.table({"name": names}))
  assert found.tolist() == [True, False, False]


def test_no_rows_and_columns_that_nothing_is_known_of():
  empty = TABLE.slice(0, 0)
  assert conditions.parse('source == "photos" or stars > 1', COLUMNS).mask(empty).shape == (0,)
  nothing = pa.table({"stars": pa.nulls(3)})
  assert not conditions.parse("stars != 1", COLUMNS).mask(nothing).any()


def test_names_that_are_not_utf8_are_decoded_alone(monkeypatch):
  """Of many names, only those near the odd ones go through Python."""
  names = [b"n%d.png" % i for i in range(1000)]
  names[700], names[3] = b"caf\xe9.png", None
  column, listed = pa.array(names, pa.binary()), []
  plain = condition_tree._shown

  def count(some):
    listed.extend([len(some)] * (len(some) <= condition_tree._FEW))
    return plain(some)

  monkeypatch.setattr(condition_tree, "_shown", count)
  monkeypatch.setattr(condition_tree, "_TILE", 256)
  table = pa.table({"name": column})
  for like, expected in (
    ("caf\ufffd%", [700]),
    ("%9\ufffd", []),
    ("n99%.png", [99, *range(990, 1000)]),
  ):
    found = conditions.parse(f'name like "{like}"', COLUMNS).mask(table)
    assert np.flatnonzero(found).tolist() == expected
  assert 0 < sum(listed) <= 3 * 2 * condition_tree._FEW


def test_comparisons_are_counted():
  most = " or ".join(f'name like "%a{i}%"' for i in range(16))
  conditions.parse(most, COLUMNS)
  days = ", ".join(f'"2020-01-{i:02d}"' for i in range(1, 18))
  for text in (f"{most} or stars > 1", f"date in [{days}]"):
    with pytest.raises(ValueError, match="filter: character [0-9]+: more than 16 comparisons"):
      conditions.parse(text, COLUMNS)
  assert matching(f"stars in [{', '.join(map(str, range(100)))}]").any()  # a list is one


def _obvious(tree, row):
  """True, False or None: not known. `tree` is (op, column, value) or (and/or/not, trees…)."""
  op, *rest = tree
  if op in ("and", "or", "not"):
    found = [_obvious(one, row) for one in rest]
    if op == "not":
      return None if found[0] is None else not found[0]
    decisive = op == "or"
    return decisive if decisive in found else None if None in found else not decisive
  column, value = rest
  known = row[column]
  if known is None or column in ("date", "year") and known < 0:
    return None
  if column == "date":
    known = (datetime.date(1970, 1, 1) + datetime.timedelta(known // (24 * HOUR))).isoformat()
  if op == "like":
    pattern = "".join(".*" if c == "%" else re.escape(c) for c in value)
    return re.fullmatch(pattern, known, re.DOTALL) is not None
  compare = {"==": known.__eq__, "!=": known.__ne__, "in": lambda v: known in v}
  compare |= {"<": known.__lt__, "<=": known.__le__, ">": known.__gt__, ">=": known.__ge__}
  return compare[op](value)


def _random(picked, depth=3):
  """A tree for `_obvious`, and how it is written."""
  if depth and picked.random() < 0.6:
    join = picked.choice(["and", "or", "not"])
    parts = [
      _random(picked, depth - 1) for _ in range(1 if join == "not" else picked.choice([2, 3]))
    ]
    written = f" {join} ".join(f"({text})" for _, text in parts)
    return (join, *(tree for tree, _ in parts)), f"not {written}" if join == "not" else written
  column = picked.choice([*COLUMNS])
  kind = COLUMNS[column]
  op = picked.choice(["==", "!=", "<", "<=", ">", ">=", "in", *["like"] * 3 * (kind == "text")])
  if op == "like":
    value = picked.choice(["%", "a%", "%b", "a%b", "%e%", "phot%20%", "a_b", "%\n%", "", "%日%"])
    return (op, column, value), f"{_name(column)} like {_written(value)}"
  values = {"text": ODD[:8], "date": DAYS[:3], "whole": [-3, 0, 5, 2020, 2**62]}
  values["number"] = [-0.5, 0.0, 2.5, 1e22, 3.0]
  if op == "in":
    value = picked.sample(values[kind], 2)
    return (op, column, value), f"{_name(column)} in [{', '.join(map(_written, value))}]"
  value = picked.choice(values[kind])
  return (op, column, value), f"{_name(column)} {op} {_written(value)}"


def _name(column):
  return f"`{column}`" if " " in column else column


def _written(value):
  if not isinstance(value, str):
    return repr(value)
  for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
    value = value.replace(plain, escaped)
  return f'"{value}"'


def test_random_conditions_as_python_evaluates_them(monkeypatch):
  monkeypatch.setattr(conditions, "MOST", 27)
  picked = random.Random(1)
  some = 0
  for _ in range(500):
    tree, text = _random(picked)
    expected = [_obvious(tree, row) is True for row in ROWS]
    assert matching(text).tolist() == expected, text
    some += 0 < sum(expected) < len(expected)
  assert some > 250  # most conditions tell rows apart


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
  """Milvus-lite with the same rows: tags are a field that may be null, other columns dynamic."""
  pymilvus = pytest.importorskip("pymilvus")
  pytest.importorskip("milvus_lite")
  logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
  client = pymilvus.MilvusClient(str(tmp_path_factory.mktemp("milvus") / "rows.db"))
  schema = client.create_schema(enable_dynamic_field=True)
  schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
  schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=2)
  for name in ("source", "folder", "name"):
    schema.add_field(name, pymilvus.DataType.VARCHAR, max_length=1000)
  for name in ("date", "year"):
    schema.add_field(name, pymilvus.DataType.INT64)
  schema.add_field("c_tag", pymilvus.DataType.VARCHAR, max_length=1000, nullable=True)
  indexes = client.prepare_index_params()
  indexes.add_index("vector", index_type="FLAT", metric_type="IP")
  client.create_collection("rows", schema=schema, index_params=indexes)
  rows = [
    {("c_tag" if key == "tag" else key): value for key, value in row.items() if value is not None}
    for row in ROWS
  ]
  client.upsert("rows", [{"id": i, "vector": [0.0, 1.0], **row} for i, row in enumerate(rows)])
  fields = {"tag": ("c_tag", "c_tag is not null")}
  for name in ("stars", "price", "my column"):
    fields[name] = f'$meta["{name}"]', f'exists $meta["{name}"]'

  def found(condition):
    hits = client.query("rows", filter=condition.milvus(fields), output_fields=["id"])
    rows = np.zeros(len(ROWS), bool)
    rows[[hit["id"] for hit in hits]] = True
    return rows

  yield found
  client.close()


def test_milvus_finds_the_same_rows(lite, monkeypatch):
  monkeypatch.setattr(conditions, "MOST", 27)
  picked = random.Random(2)
  for _ in range(150):
    text = _random(picked)[1]
    condition = conditions.parse(text, COLUMNS)
    np.testing.assert_array_equal(lite(condition), condition.mask(TABLE), text)
  for folder in ("photos", "photos/2019", "a\\b", "nowhere", 'q" or year > 0 or "'):
    condition = conditions.inside(folder)
    np.testing.assert_array_equal(lite(condition), condition.mask(TABLE), folder)


def test_hostile_texts_stay_texts(lite):
  """Each finds the images that have this very text; none ends the literal it is written into."""
  for text in [
    *ODD,
    '"',
    "\\",
    '\\"',
    '" or year > 0 or tag == "',
    "'; drop",
    "\\'",
    "$meta",
    "\r\n",
  ]:
    condition = conditions.Test("name", "==", text)
    expected = [row["name"] == text for row in ROWS]
    assert condition.mask(TABLE).tolist() == expected
    assert lite(condition).tolist() == expected
    assert lite(condition.opposite()).tolist() == [not x for x in expected]


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    ("", "character 1: a column should be here; columns are source, folder"),
    (
      "yaer > 2020",
      "character 1: 'yaer' is no column; columns are source, folder, name, date, year",
    ),
    ("year > 'a'", "character 8: year is compared with a number, not with 'a'"),
    ("year > 2020.5", "character 8: 2020.5 is no whole number of 64 bits"),
    ("stars == 99999999999999999999", "no whole number of 64 bits"),
    ("price == 1e999", "no number of 64 bits"),
    ("source == 5", 'character 11: source is compared with a text "in quotes", not with 5'),
    ("date > 2020", 'date is compared with a day as in "2020-06-01", not with 2020'),
    ('date > "June"', '"June" is no day as in "2020-06-01"'),
    ("year = 2020", "character 6: '=' is not understood; equality is =="),
    ("year == 2020 && stars > 1", "'&' is not understood; say and"),
    ('name == "a', "character 9: '\"' is not understood: no quote ends it"),
    ("year like '2%'", "like is for texts, and year is a whole"),
    ('name like "a\\\\b%"', "like cannot look for backslashes"),
    ('name == "\\x41"', "\\x is not understood; a backslash itself is \\\\"),
    ("name like 5", 'after like should be a text "in quotes"'),
    ("year in 2020", "after in should be a list: year in [a, b]"),
    ("year in []", "compared with a number, not with ]"),
    ("year in [1, 2", "the list is not closed by ]"),
    ("(year == 1", "the parenthesis of character 1 is not closed"),
    ("year == 1)", "')' comes after a whole condition; join conditions by and, or"),
    ("year == 1 year == 2", "'year' comes after a whole condition"),
    ("1 == year", "a column should be here, not 1"),
    ("year not 5", "after year should be == != < <= > >= in or like, not 5"),
    ("year", "after year should be == != < <= > >= in or like"),
    ("year >", "year is compared with a number, not with nothing"),
    ("not", "a column should be here"),
    ("and == 1", "a column should be here, not and"),
    ("__import__('os')", "'__import__' is no column"),
    ("(" * 10_000, "has 10,000 characters, at most 1,000 are read"),
    ("(" * 900, "more than 50 parentheses and nots lie in each other"),
    ("not " * 200 + "year > 1", "more than 50 parentheses and nots"),
    ("year == \u0661", "is not understood"),
    ("name == '\ud800'", "is not valid Unicode"),
    ("\x00", "is not understood"),
  ],
)
def test_what_is_wrong_and_where(text, sentence):
  with pytest.raises(ValueError) as e:
    conditions.parse(text, COLUMNS)
  assert str(e.value).startswith("filter: ") and sentence in str(e.value)
  assert "\n" not in str(e.value)


def test_damaged_conditions_are_read_or_refused():
  """Some pieces are cut out and some put in: a condition or a ValueError, nothing else."""
  picked = random.Random(3)
  pieces = [
    *"()[],'\"\\`=%\n日\x00!<>&",
    " and ",
    " or ",
    " not ",
    " in ",
    " like ",
    "year",
    "==",
    "1.5",
  ]
  read = refused = 0
  for _ in range(2000):
    text = _random(picked, 1)[1]
    for _ in range(picked.randrange(1, 3)):
      at = picked.randrange(len(text))
      cut = picked.choice([0, 0, 1, 3])
      text = text[:at] + picked.choice(["", picked.choice(pieces)]) + text[at + cut :]
    try:
      conditions.parse(text, COLUMNS).mask(TABLE)
      read += 1
    except ValueError as e:
      assert str(e).startswith("filter: "), text
      refused += 1
  assert min(read, refused) > 200
