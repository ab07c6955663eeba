"""How what is known of an image is written to Milvus, and read from it."""

import os
import re

import numpy as np
import pyarrow as pa

LONGEST = 65_535  # bytes of a text, by Milvus's limit
OWN_TEXTS = ("source", "folder", "name")
OWN_NUMBERS = ("date", "year", "stamp_size", "stamp_time", "batch")
_PLAIN = re.compile(r"[A-Za-z0-9_]{1,200}")


def fields(columns, version):
  """Typed fields of a new collection: {field: arguments of add_field}, and {column: its field}.

  Of the columns of tables, those whose name Milvus can write; `c_` keeps them apart from ours.
  None of a server before 2.5, whose fields cannot be null.
  """
  import pymilvus

  kinds = pymilvus.DataType
  text = {"datatype": kinds.VARCHAR, "max_length": LONGEST}
  out = {name: text for name in OWN_TEXTS}
  out["raw_name"] = text
  out |= {name: {"datatype": kinds.INT64} for name in OWN_NUMBERS}
  types = {"text": text, "whole": {"datatype": kinds.INT64}, "number": {"datatype": kinds.DOUBLE}}
  found = re.match(r"v?(\d+)\.(\d+)", version)
  old = found and (int(found[1]), int(found[2])) < (2, 5)
  written = {name: _key(name) for name in columns if not old and _PLAIN.fullmatch(name)}
  out |= {field: types[columns[name]] | {"nullable": True} for name, field in written.items()}
  return out, written


def _key(column):
  """A server can be asked for the values of plain names only."""
  return f"c_{column}" if _PLAIN.fullmatch(column) else f"h_{column.encode().hex()}"


class Rows:
  """`columns` {name: type} are all that conditions may name; `fields` {column of a table: field},
  columns of tables that are not in it are dynamic. `version`: what the engine says of itself."""

  def __init__(self, columns, fields, version):
    self._merges = version.startswith("milvus_lite")  # keeps values that an upsert does not name
    own = (*OWN_TEXTS, *OWN_NUMBERS)
    self._key = {name: name if name in own else _key(name) for name in columns}
    self._key |= {name: name for name in own}
    self._of_tables = [name for name in columns if name not in own]
    # As conditions write them; see condition_tree.Condition.milvus.
    self.written = {}
    for name in self._of_tables:
      if name in fields:
        self.written[name] = fields[name], f"{fields[name]} is not null"
      else:
        field = f'$meta["{self._key[name]}"]'
        self.written[name] = field, f"(exists {field})"

  def make(self, ids, vectors, batch, columns):
    """Rows for `upsert`. A missing value is not named: for a server, a dynamic one would exist and
    differ from everything."""
    values = {name: column.to_pylist() for name, column in _plain(columns).items()}
    count, nothing = len(ids), [None] * len(ids)
    names = values.pop("name")
    out = {"id": ids, "vector": list(vectors), "batch": batch.tolist()}
    out["name"] = [name.decode("utf-8", "replace") for name in names]
    out["raw_name"] = [_raw(name) for name in names]
    for name in ("source", "folder", "date", "year", "stamp_size", "stamp_time"):
      out[name] = values.pop(name)
    for name in self._of_tables:
      known = values.get(name, nothing)
      out[self._key[name]] = [None if x != x else x for x in known]  # NaN
    for name, texts in out.items():
      long = next((x for x in texts if isinstance(x, str) and len(x.encode()) > LONGEST), None)
      if long:
        column = next((column for column, key in self._key.items() if key == name), name)
        raise ValueError(
          f"{column}: {long[:40]!r}… has more than {LONGEST:,} bytes, which is "
          "the most that Milvus keeps"
        )
    rows = [{name: column[i] for name, column in out.items()} for i in range(count)]
    if self._merges:
      return rows
    return [{name: value for name, value in row.items() if value is not None} for row in rows]

  def fields(self, columns):
    """What to ask of Milvus for these columns."""
    asked = [self._key[name] for name in columns]
    return [*asked, "raw_name"] if "name" in columns else asked

  def value(self, row, column):
    """Of a row of Milvus: None if it is missing."""
    if column == "name":
      return bytes.fromhex(raw) if (raw := row.get("raw_name")) else os.fsencode(row["name"])
    return row.get(self._key[column])


def _raw(name):
  """A name that is not UTF-8, in hexadecimal: texts of Milvus are UTF-8. Others: nothing."""
  try:
    name.decode()
    return ""
  except UnicodeDecodeError:
    return name.hex()


def _plain(columns):
  """Without dictionaries."""
  out = {}
  for name, column in columns.items():
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    column = pa.array(column) if isinstance(column, np.ndarray) else column
    out[name] = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
  return out
