"""Ids, captions and the hash of a split come from columns beside its shards, never from these."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from xe_retrieval import prepare
from xe_retrieval.data import columns, pipeline
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.preparation import records
from xe_retrieval.search import image_sources


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """Two splits of 300 tiny images with one to three captions each, in several shards."""
  root = tmp_path_factory.mktemp("prepared")
  (root / "photos").mkdir()
  rows = ["image\tcaption\tsplit"]
  for i in range(600):
    Image.new("RGB", (8, 8), (i % 256, i // 256, 7)).save(root / f"photos/{i}.png")
    split = "test" if i % 2 else "train"
    rows += [f"{i}.png\tbild {i} größe {n}\t{split}" for n in range(1 + i % 3)]
  (root / "t.tsv").write_text("\n".join(rows))
  job = prepare.table(str(root / "t.tsv"), str(root / "photos"))
  prepare.prepare(job, str(root / "out"), records.Options())
  return root / "out"


def parsed(source):
  """Every record as tf.train.Example: {feature: [values of each record]}."""
  out = {}
  for data in source.read(range(len(source))):
    features = tf.train.Example.FromString(data).features.feature
    for name, feature in features.items():
      values = list(feature.bytes_list.value) or list(feature.int64_list.value)
      out.setdefault(name, []).append(values)
  return out


def unreadable(*_):
  raise AssertionError("records are read")


@pytest.mark.parametrize("split", ["train", "test"])
def test_columns_are_those_of_the_records_and_read_none(prepared, split, monkeypatch):
  assert len(list(prepared.glob(f"captions/t/1.0.0/*{split}*.array_record*"))) > 1
  source = pipeline.Source("captions/t", str(prepared), split)
  expected, whole = parsed(source), hashlib.sha256(b"300")
  for data in source.read(range(300)):
    whole.update(data)
  monkeypatch.setattr(pipeline.Source, "read", unreadable)
  assert source.fingerprint() == whole.hexdigest()  # keys of cached features stay what they were
  assert [[i] for i in source.column("image_id").tolist()] == expected["image_id"]
  assert [[name] for name in source.column("file")] == expected["file"]
  for name in ("captions", "text_ids", "caption_ids"):
    column = source.column(name)
    assert list(column) == expected[name] and column[7] == column[7 - 300] == expected[name][7]
    assert column[5:9] == expected[name][5:9]
    assert list(column.flat) == [value for record in expected[name] for value in record]
    assert column.counts.tolist() == [len(record) for record in expected[name]]
  captions = [[c.decode() for c in record] for record in expected["captions"]]
  assert list(source.captions()) == captions
  with pytest.raises(IndexError):
    source.captions()[300]
  entries = list(image_sources.Dataset("captions/t", split, str(prepared)).entries())
  assert len(entries) == 300 and entries[0].stamp[0] == expected["image_id"][0][0]


def test_a_data_set_without_columns_gets_them_once(prepared, tmp_path, monkeypatch):
  out = shutil.copytree(prepared, tmp_path / "out")
  shutil.rmtree(out / "captions/t/1.0.0/columns")
  known = pipeline.Source("captions/t", str(prepared), "test")
  first = pipeline.Source("captions/t", str(out), "test")
  assert first.fingerprint() == known.fingerprint()
  assert list(first.captions()) == list(known.captions())
  monkeypatch.setattr(pipeline.Source, "read", unreadable)
  again = pipeline.Source("captions/t", str(out), "test")
  assert again.fingerprint() == known.fingerprint()
  assert [p.name for p in (out / "captions/t/1.0.0/columns").iterdir()] == ["test"]


def test_where_nothing_can_be_written_they_are_in_memory(prepared, tmp_path, monkeypatch):
  out = shutil.copytree(prepared, tmp_path / "out")
  shutil.rmtree(out / "captions/t/1.0.0/columns")
  (out / "captions/t/1.0.0/columns").write_text("not a directory")
  known = pipeline.Source("captions/t", str(prepared), "test")
  source = pipeline.Source("captions/t", str(out), "test")
  assert source.fingerprint() == known.fingerprint()
  assert list(source.captions()) == list(known.captions())
  np.testing.assert_array_equal(source.column("image_id"), known.column("image_id"))


def test_columns_of_other_shards_are_made_anew(prepared, tmp_path):
  out = shutil.copytree(prepared, tmp_path / "out")
  about = out / "captions/t/1.0.0/columns/test/about.json"
  stale = json.loads(about.read_text())
  stale["shards"] = dict.fromkeys(stale["shards"], 1)
  about.write_text(json.dumps(stale | {"fingerprint": "stale"}))
  known = pipeline.Source("captions/t", str(prepared), "test")
  source = pipeline.Source("captions/t", str(out), "test")
  assert source.fingerprint() == known.fingerprint()
  assert json.loads(about.read_text())["fingerprint"] == known.fingerprint()


def test_an_interrupted_writer_leaves_nothing(tmp_path):
  def interrupted():
    yield [records.example(image_id=[1])]
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    columns.write(tmp_path / "train", [], ["image_id"], 2, interrupted())
  assert list(tmp_path.iterdir()) == []
