"""Tables of captions → rows: CSV, TSV and JSONL with a header, Karpathy's and COCO's JSON."""

import csv
import json
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xe_retrieval.preparation.rejections import Rejected, Rejection

COLUMNS = ("image", "caption", "split", "image_id", "caption_id")
MAX_CAPTION = 10_000  # characters
_LONGEST_LINE = 1 << 20  # bytes; the rest of a line is skipped
_FORMATS = {".csv": ",", ".tsv": "\t", ".jsonl": None}


class Row(NamedTuple):
  where: str  # file:line
  image: str
  caption: str
  split: str | None = None
  image_id: str | None = None
  caption_id: str | None = None


class Caption(NamedTuple):
  where: str
  id: str
  text: str


class Sample(NamedTuple):
  """One image and its captions."""

  file: str
  split: str | None
  captions: list[Caption]


def rows(path: str) -> Iterator[Row | Rejection]:
  """The rows of a CSV, TSV or JSONL file, in order; malformed ones as rejections."""
  path = pathlib.Path(path)
  if path.suffix.lower() not in _FORMATS:
    raise ValueError(f"{path}: a table of captions should end in {', '.join(_FORMATS)}")
  if not path.is_file():
    raise ValueError(f"{path}: there is no such file")
  records = _json_records(path) if path.suffix.lower() == ".jsonl" else _csv_records(path)
  for line, record in records:
    yield _checked(f"{path.name}:{line}", record)


def karpathy(path: str) -> Iterator[Row | Rejection]:
  """The rows of dataset_flickr30k.json (or _flickr8k, _coco) in Karpathy's format."""
  path, document = _json_document(path)
  splits = {"val": "validation", "restval": "train"}
  try:
    entries = [
      (i["filename"], splits.get(i["split"], i["split"]), n, s["raw"])
      for i in document["images"]
      for n, s in enumerate(i["sentences"])
    ]
  except (KeyError, TypeError) as e:
    raise ValueError(f'{path}: should be {{"images": [{{"filename", "split", …: {e!r}') from e
  for file, split, n, raw in entries:
    record = {"image": file, "caption": raw, "split": split, "caption_id": f"{file}#{n}"}
    yield _checked(f"{path.name}:{file}#{n}", record)


def coco(path: str, split: str | None = None) -> Iterator[Row | Rejection]:
  """The rows of COCO's captions_train2017.json and the like, one per annotation, all in `split`."""
  path, document = _json_document(path)
  try:
    files = {image["id"]: image["file_name"] for image in document["images"]}
    entries = [
      (a["id"], a["image_id"], files.get(a["image_id"]), a["caption"])
      for a in document["annotations"]
    ]
  except (KeyError, TypeError) as e:
    what = f"it or one of its entries has no {e}" if isinstance(e, KeyError) else str(e)
    raise ValueError(
      f'{path}: should be {{"images": [{{"id", "file_name"}}, …], "annotations": [{{"id", '
      f'"image_id", "caption"}}, …]}} like captions_train2017.json, but {what}'
    ) from e
  named = {"split": split} if split else {}
  for number, image, file, caption in entries:
    where = f"{path.name}:annotation {number}"
    if file is None:
      detail = f"image_id {printable(image)} is not among the images"
      yield Rejection(where, "", "missing file", detail)
    else:
      yield _checked(where, {"image": file, "caption": caption, "caption_id": number, **named})


def group(
  rows: Iterable[Row | Rejection], duplicates: bool = False
) -> tuple[list[Sample], list[Rejection]]:
  """Groups rows by image, in order of first appearance; `duplicates` keeps equal captions."""
  samples, seen, rejections = {}, {}, []
  for row in rows:
    if isinstance(row, Rejection):
      rejections.append(row)
      continue
    key = row.image_id or row.image
    sample = samples.setdefault(key, Sample(row.image, row.split, []))
    known = seen.setdefault(key, set())
    wrong = None
    if row.image != sample.file:
      wrong = "contradiction", f"image_id {key} is {sample.file} above"
    elif row.split != sample.split:
      wrong = "contradiction", f"the same image is in split {sample.split} above"
    elif row.caption.casefold() in known and not duplicates:
      wrong = "duplicate", "the same image has the same caption above"
    if wrong:
      rejections.append(Rejection(row.where, row.image, *wrong))
      continue
    known.add(row.caption.casefold())
    caption_id = row.caption_id or f"{row.image}#{len(sample.captions)}"
    sample.captions.append(Caption(row.where, caption_id, row.caption))
  return list(samples.values()), rejections


def clean(caption: str) -> str:
  """One line without control characters; Rejected if empty or too long."""
  if len(caption) > MAX_CAPTION:
    raise Rejected("too long", f"{len(caption):,} characters; at most {MAX_CAPTION:,}")
  if _BROKEN.search(caption):
    raise Rejected("not UTF-8", repr(caption[:60]))
  words = "".join(" " if unicodedata.category(c) == "Cc" else c for c in caption).split()
  if not words:
    raise Rejected("empty caption")
  return " ".join(words)


_BROKEN = re.compile("[\ud800-\udfff]")  # "surrogateescape" maps invalid UTF-8 to these


def check_split(split: str) -> str:
  if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", split) or split.lower() == "all":
    raise Rejected("unreadable row", f"split {split[:60]!r} should be like train or test, not all")
  return split


def split_and_path(flag: str, text: str) -> tuple[str | None, str]:
  """An argument [split=]path -> (split or None, path)."""
  named = re.fullmatch(r"([A-Za-z]\w*)=(.+)", text)
  if not named:
    return None, text
  try:
    return check_split(named[1]), named[2]
  except Rejected as e:
    raise ValueError(f"--{flag}={text}: {e.detail}") from e


def _checked(where, record):
  """A row, or the rejection of a record that is none."""
  try:
    if isinstance(record, Rejected):
      raise record
    return _row(where, record)
  except Rejected as e:
    image = record.get("image", "") if isinstance(record, dict) else ""
    return Rejection(where, printable(image), e.reason, e.detail)


def _json_document(path):
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"{path}: there is no such file")
  try:
    return path, json.loads(path.read_bytes())
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{path}: should be a JSON file: {e}") from e


def _row(where, record):
  for name in COLUMNS[:2]:
    if not isinstance(record.get(name), str):
      raise Rejected("unreadable row", f"{name!r} should be a string, is {record.get(name)!r:.60}")
  ids = {k: str(record[k]) for k in COLUMNS[2:] if record.get(k) not in (None, "")}
  if _BROKEN.search(record["image"] + "".join(ids.values())):
    raise Rejected("not UTF-8", ascii(record["image"][:60]))
  if "split" in record:
    ids["split"] = check_split(ids.get("split", ""))
  if not record["image"].strip():
    raise Rejected("missing file", "the file name is empty")
  if len(record["image"]) > 4096 or any(len(v) > 4096 for v in ids.values()):
    raise Rejected("too long", "a file name or id of more than 4,096 characters")
  return Row(where, record["image"], clean(record["caption"]), **ids)


def _csv_records(path):
  """(line, {column: value} or Rejected) of a table with a header."""
  csv.field_size_limit(2 * MAX_CAPTION)
  delimiter = _FORMATS[path.suffix.lower()]
  # CSV quotes fields, TSV does not.
  quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
  reader = csv.reader(_lines(path), delimiter=delimiter, quoting=quoting)
  try:
    header = [name.strip().lower() for name in next(reader, [])]
  except csv.Error:
    header = []
  missing = [name for name in COLUMNS[:2] if name not in header]
  if missing:
    raise ValueError(
      f"{path}:1: the header has no column {' and no '.join(map(repr, missing))}, but "
      f"{', '.join(map(printable, header[:8])) or 'nothing'}; needed: image, caption; "
      "possible: split, image_id, caption_id"
    )
  while True:
    first = reader.line_num + 1
    try:
      values = next(reader)
    except StopIteration:
      return
    except csv.Error as e:
      last = f"-{reader.line_num}" if reader.line_num > first else ""
      why = "unclosed quote?" if last else str(e)
      yield f"{first}{last}", Rejected("too long" if not last else "unreadable row", why)
      continue
    if not values:
      continue
    if len(values) != len(header):
      detail = f"{len(values)} fields, but the header has {len(header)}"
      yield first, Rejected("unreadable row", detail)
    else:
      yield first, dict(zip(header, values, strict=True))


def _json_records(path):
  """(line, object or Rejected) of a file with one JSON object per line."""
  for number, line in enumerate(_lines(path), 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
      if not isinstance(record, dict):
        raise ValueError("not an object")
      yield number, record
    except (ValueError, RecursionError) as e:
      yield number, Rejected("unreadable row", " ".join(str(e).split())[:100])


def _lines(path):
  """Lines as text; invalid UTF-8 becomes surrogates, very long lines are truncated."""
  with path.open("rb") as file:
    start = file.read(3)
    file.seek(3 if start == b"\xef\xbb\xbf" else 0)
    while line := file.readline(_LONGEST_LINE):
      rest = line
      while rest and not rest.endswith(b"\n") and len(rest) == _LONGEST_LINE:
        rest = file.readline(_LONGEST_LINE)
      yield line.decode("utf-8", "surrogateescape")


def printable(text):
  """Truncated and escaped, for the terminal and for a TSV field."""
  text = str(text)[:200].encode("utf-8", "backslashreplace").decode()
  return "".join("?" if unicodedata.category(c) == "Cc" else c for c in text)
