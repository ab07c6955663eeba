"""Rows of every table format, and how they are grouped by image."""

import json

import pytest

from xe_retrieval.preparation import archives, caption_tables
from xe_retrieval.preparation.rejections import Rejection


def read(tmp_path, name, content):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return list(caption_tables.rows(path))


def test_csv_quotes_and_a_byte_order_mark(tmp_path):
  content = (
    '\ufeffCaption,image\n"one, ""two""",a.jpg\r\n"over\nlines",b.jpg\n\n it\'s "raw",c.jpg\n'
  )
  rows = read(tmp_path, "t.csv", content)
  assert [(r.where, r.image, r.caption) for r in rows] == [
    ("t.csv:2", "a.jpg", 'one, "two"'),
    ("t.csv:3", "b.jpg", "over lines"),
    ("t.csv:6", "c.jpg", 'it\'s "raw"'),
  ]


def test_tsv_does_not_quote(tmp_path):
  rows = read(tmp_path, "t.tsv", 'image\tcaption\na.jpg\t"open\nb.jpg\ttwo words\n')
  assert [r.caption for r in rows] == ['"open', "two words"]


def test_jsonl_and_ids(tmp_path):
  lines = [
    {"image": "a.jpg", "caption": "x", "image_id": 7, "caption_id": 70, "split": "dev"},
    {"image": "a.jpg", "caption": "y", "image_id": 7, "split": "dev", "more": [1]},
    {"image": "b.jpg", "caption": "z", "image_id": 7, "split": "dev"},
    {"image": "b.jpg", "caption": ["a", "list"]},
    {"image": "b.jpg", "caption": "\ud800"},
    {"image": "b.jpg", "caption": "w", "split": "no word"},
    ["not", "an", "object"],
  ]
  rows = read(tmp_path, "t.jsonl", "\n".join(map(json.dumps, lines)))
  samples, rejections = caption_tables.group(rows)
  (sample,) = samples
  assert (sample.file, sample.split) == ("a.jpg", "dev")
  assert [(c.id, c.text) for c in sample.captions] == [("70", "x"), ("a.jpg#1", "y")]
  assert {(r.where, r.reason) for r in rejections} == {
    ("t.jsonl:3", "contradiction"),
    ("t.jsonl:4", "unreadable row"),
    ("t.jsonl:5", "not UTF-8"),
    ("t.jsonl:6", "unreadable row"),
    ("t.jsonl:7", "unreadable row"),
  }
  assert all(isinstance(r, Rejection) for r in rejections)


def test_other_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"t\.xlsx: a table of captions should end in \.csv, \.tsv"):
    read(tmp_path, "t.xlsx", "")
  with pytest.raises(ValueError, match=r"t\.csv:1: the header has no column 'image' and no 'capt"):
    read(tmp_path, "t.csv", b"\xff\xfei\0m\0a\0g\0e\0")


def test_names_of_shards(tmp_path):
  for name in ("a-08", "a-09", "a-10", "b-x", "b-y"):
    (tmp_path / f"{name}.tar").touch()
  found = lambda pattern: [  # noqa: E731
    (path.rpartition("/")[2], split) for path, split in archives.shards(pattern)
  ]
  assert found(f"{tmp_path}/a-{{08..10}}.tar") == [(f"a-{n}.tar", None) for n in ("08", "09", "10")]
  assert found(f"test={tmp_path}/b-{{x,y}}.tar") == [("b-x.tar", "test"), ("b-y.tar", "test")]
  assert found(f"{tmp_path}/b-*.tar") == [("b-x.tar", None), ("b-y.tar", None)]
  with pytest.raises(ValueError, match="Unbalanced braces"):
    archives.shards(f"{tmp_path}/a-{{08..10.tar")
