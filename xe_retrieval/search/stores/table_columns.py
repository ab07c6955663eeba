"""Further columns of images, from a table: TSV, CSV, JSONL or Parquet with a column `image`.

`image` is the name in the source, as in `skipped.tsv`. The other columns are whole numbers, numbers
or text, by what is in them; empty cells are missing values.
"""

import hashlib
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from xe_retrieval.search.stores.store import OWN, TYPES

_TAKEN = {*OWN, "id", "vector"}


class TableColumns:
  def __init__(self, path):
    self.path = pathlib.Path(path).expanduser()
    table = self._read()
    if "image" not in table.column_names:
      names = ", ".join(table.column_names)
      raise ValueError(f"{path} has no column 'image', the names of the images; it has {names}")
    self.types = {n: self._type(n, table[n].type) for n in table.column_names if n != "image"}
    if not self.types:
      raise ValueError(f"{path} has no column besides 'image'")
    names = table["image"].cast(pa.binary())
    if names.null_count:
      raise ValueError(f"{path}: {names.null_count:,} rows have no 'image'")
    self._columns = {n: _cast(table[n], TYPES[kind]) for n, kind in self.types.items()}
    hashes = np.concatenate([_hashes(chunk.to_pylist()) for chunk in _chunks(names)])
    order = np.argsort(hashes, kind="stable")
    self._names, self._hashes, self._order = names, hashes[order], order
    if len(twice := np.flatnonzero(np.diff(self._hashes) == 0)):
      name = names[int(order[twice[0]])].as_py()
      raise ValueError(f"{path}: image {name.decode('utf-8', 'replace')!r} is in more than one row")
    digest = hashlib.blake2b(digest_size=16)
    with open(self.path, "rb") as file:
      while block := file.read(1 << 20):
        digest.update(block)
    self.fingerprint = digest.hexdigest()

  def of(self, names: list[bytes]) -> dict[str, pa.Array]:
    """The columns of images; null where the table does not have them."""
    wanted = _hashes(names)
    at = np.minimum(np.searchsorted(self._hashes, wanted), max(len(self._hashes) - 1, 0))
    there = self._hashes[at] == wanted if len(self._hashes) else np.zeros(len(names), bool)
    rows = pa.array(self._order[at] if len(self._order) else at, mask=~there)
    return {name: column.take(rows) for name, column in self._columns.items()}

  def differs(self, names: list[bytes], held: dict) -> np.ndarray:
    """bool [n]: of which images a collection holds other values, as Store.fetch gives them."""
    found = np.zeros(len(names), bool)
    for name, new in self.of(names).items():
      old = pa.array(held[name], new.type)
      missing = [np.asarray(pc.is_null(one, nan_is_null=True)) for one in (old, new)]
      same = np.asarray(pc.fill_null(pc.equal(old, new), False))
      found |= ~np.where(missing[0] | missing[1], missing[0] & missing[1], same)
    return found

  def _read(self):
    kind = self.path.suffix.lower()
    as_bytes = pa.csv.ConvertOptions(column_types={"image": pa.binary()}, strings_can_be_null=True)
    try:
      if kind == ".parquet":
        return pa.parquet.read_table(self.path)
      if kind in (".jsonl", ".json"):
        return pa.json.read_json(self.path)
      if kind == ".csv":
        lines = pa.csv.ParseOptions(newlines_in_values=True)
        return pa.csv.read_csv(self.path, parse_options=lines, convert_options=as_bytes)
      if kind == ".tsv":
        tabs = pa.csv.ParseOptions(delimiter="\t", newlines_in_values=True)
        return pa.csv.read_csv(self.path, parse_options=tabs, convert_options=as_bytes)
    except (OSError, pa.ArrowException) as e:
      raise ValueError(f"{self.path} cannot be read as a table: {' '.join(str(e).split())}") from e
    raise ValueError(f"{self.path} should be a table that ends in .tsv, .csv, .jsonl or .parquet")

  def _type(self, name, found):
    if not name.isidentifier() or not name.isascii() or name in _TAKEN:
      taken = "is taken" if name in _TAKEN else "is no plain name (letters, digits and _)"
      raise ValueError(f"{self.path}: column {name!r} {taken}; rename it")
    if pa.types.is_nested(found):
      raise ValueError(f"{self.path}: column {name!r} holds lists or objects: give it one value")
    if pa.types.is_integer(found) and found != pa.uint64():
      return "whole"
    if pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found):
      return "number"
    return "text"

  def agree(self, columns: dict[str, str]) -> None:
    """ValueError if a collection has one of these columns with another type."""
    for name, kind in self.types.items():
      if columns.get(name, kind) != kind:
        raise ValueError(
          f"{self.path}: column {name!r} is {kind}, but {columns[name]} in the index; --rebuild "
          "makes it anew"
        )


def held(store, ids, there, columns: dict[str, str]) -> dict[str, pa.Array]:
  """Columns of a store for images of which `there`, bool [n], are in it; null for the others."""
  if not columns or not there.any():
    return {}
  found = store.fetch(ids[there], list(columns))
  at = pa.array(np.cumsum(there) - 1, mask=~there)
  return {name: pa.array(found[name], TYPES[kind]).take(at) for name, kind in columns.items()}


def _cast(column, kind):
  try:
    return column.combine_chunks().cast(kind)
  except pa.ArrowInvalid:  # text that is not UTF-8
    shown = [None if v is None else bytes(v).decode("utf-8", "replace") for v in column.to_pylist()]
    return pa.array(shown, kind)


def _chunks(column):
  return [column.slice(i, 1 << 16) for i in range(0, len(column), 1 << 16)] or [column]


def _hashes(names):
  digests = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
  return np.frombuffer(b"".join(digests), np.uint64)
