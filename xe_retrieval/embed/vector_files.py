"""One file of a part: some thousand pictures with their vectors, as Parquet."""

import dataclasses
import hashlib
import os
import re
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xe_retrieval.data import paths
from xe_retrieval.search import image_sources

AGAIN = "the same --part of embed makes it anew"
# What tells one state of a picture from another.
ROW = np.dtype([("id", "<u8"), ("stamp_size", "<i8"), ("stamp_time", "<i8")])


@dataclasses.dataclass(frozen=True)
class File:
  """A chunk that is on disk."""

  name: str
  rows: np.ndarray  # ROW [n]
  size: int
  crc: int


def is_chunk(name: str) -> bool:
  return re.fullmatch(r"\d{6,}-[0-9a-f]{8}\.parquet", name) is not None


def is_list(name: str) -> bool:
  return re.fullmatch(r"skipped-[0-9a-f]{8}\.jsonl", name) is not None


def number(name: str) -> int:
  """Of a chunk."""
  return int(name.partition("-")[0])


def list_name(content: bytes) -> str:
  return f"skipped-{_digest(content)}.jsonl"


def _digest(data):
  return hashlib.blake2b(data, digest_size=4).hexdigest()


def schema(width: int) -> pa.Schema:
  return pa.schema(
    [
      pa.field("id", pa.uint64(), nullable=False),
      pa.field("name", pa.binary(), nullable=False),
      pa.field("vector", pa.list_(pa.field("item", pa.float32(), nullable=False), width), False),
      pa.field("stamp_size", pa.int64(), nullable=False),
      pa.field("stamp_time", pa.int64(), nullable=False),
    ]
  )


def rows_of(key: str, entries) -> np.ndarray:
  """Entries [n] of a source -> ROW [n]."""
  rows = np.empty(len(entries), ROW)
  rows["id"] = image_sources.ids(key, [os.fsencode(e.name) for e in entries])
  stamps = np.array([e.stamp for e in entries], np.int64).reshape(-1, 2)
  rows["stamp_size"], rows["stamp_time"] = stamps.T
  return rows


def table(rows: np.ndarray, entries, vectors: np.ndarray) -> pa.Table:
  """ROW [n], entries [n], float32 [n, width]."""
  kind = schema(vectors.shape[1])
  flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
  columns = [
    pa.array(rows["id"]),
    pa.array([os.fsencode(e.name) for e in entries], pa.binary()),
    pa.FixedSizeListArray.from_arrays(flat, type=kind.field("vector").type),
    pa.array(rows["stamp_size"]),
    pa.array(rows["stamp_time"]),
  ]
  return pa.Table.from_arrays(columns, schema=kind)


def write(folder, number: int, content: pa.Table) -> File:
  """On disk when this returns. The name has a hash of the rows: who writes the same, agrees."""
  rows = _rows(content)
  name = f"{number:06d}-{_digest(rows.tobytes())}.parquet"
  sink = pa.BufferOutputStream()
  plain = dict(use_dictionary=False, write_statistics=False, write_page_checksum=True)
  # Vectors do not get smaller by compression, names do.
  compression = {field: "zstd" if field == "name" else "none" for field in content.column_names}
  pq.write_table(content, sink, compression=compression, **plain)
  data = sink.getvalue().to_pybytes()
  if paths.create(folder / name, data):
    return File(name, rows, len(data), zlib.crc32(data))
  return read(folder, name, content.schema)[0]


def read(folder, name: str, kind: pa.Schema, crc: int | None = None) -> tuple[File, pa.Table]:
  """ValueError, one sentence, if it is damaged or missing; OSError if the disk fails."""
  path = folder / name
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    raise ValueError(f"{path} is missing; {AGAIN}") from None
  try:
    if crc not in (None, zlib.crc32(data)):
      raise ValueError("its checksum is another one")
    reader = pa.BufferReader(data)
    content = pq.read_table(reader, page_checksum_verification=True, use_threads=False)
    if not content.schema.equals(kind):
      raise ValueError("its columns are other ones")
    if any(column.null_count for column in content.columns):
      raise ValueError("values are missing")
  except (OSError, ValueError, pa.ArrowException) as e:  # OSError: of Arrow, which reads memory
    why = (str(e).splitlines() or [""])[0]
    raise ValueError(f"{path} is damaged ({why}); {AGAIN}") from e
  return File(name, _rows(content), len(data), zlib.crc32(data)), content


def vectors(content: pa.Table) -> np.ndarray:
  """float32 [n, width]."""
  width = content.schema.field("vector").type.list_size
  flat = [chunk.flatten().to_numpy() for chunk in content.column("vector").chunks]
  return np.concatenate([np.zeros(0, np.float32), *flat]).reshape(-1, width)


def _rows(content):
  rows = np.empty(len(content), ROW)
  for name in ROW.names:
    rows[name] = content.column(name).to_numpy()
  return rows
