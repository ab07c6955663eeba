"""Tar shards → data sets."""

import json

import pytest

from tests.preparation.conftest import encoded, run, source, write_tar
from xe_retrieval import prepare
from xe_retrieval.preparation import records


def shard(path, numbers):
  members = []
  for n in numbers:
    members += [(f"{n:09d}.jpg", encoded(n)), (f"{n:09d}.txt", f"caption {n}".encode())]
    members += [(f"{n:09d}.json", json.dumps({"caption": f"caption {n}", "url": "u"}).encode())]
  return write_tar(path, members)


def test_webdataset(tmp_path):
  for s in range(3):
    shard(tmp_path / f"{s:05d}.tar", range(10 * s, 10 * s + 10))
  write_tar(
    tmp_path / "validation.tar",
    [
      ("a.png", encoded(90, kind="PNG")),
      ("a.json", b'{"caption": "only in json"}'),
      ("b.jpg", encoded(91)),
      ("c.txt", b"no image"),
      ("../../d.jpg", encoded(92)),
      ("../../d.txt", b"outside"),
      ("e.jpg", encoded(93)),
      ("e.txt", b"\xff\xfe broken"),
    ],
  )
  patterns = [f"train={tmp_path}/{{00000..00002}}.tar", f"validation={tmp_path}/validation.tar"]
  manifest = run(prepare.webdataset(patterns), tmp_path)
  assert {s: p["images"] for s, p in manifest["splits"].items()} == {"train": 30, "validation": 1}
  assert source(tmp_path, "conceptual_captions").captions()[12] == ["caption 12"]
  assert list(source(tmp_path, "conceptual_captions", "validation").captions()) == [
    ["only in json"]
  ]
  assert manifest["rejected"] == {
    "missing file": 1,
    "outside the folder": 2,
    "empty caption": 1,
    "not UTF-8": 1,
  }


def test_a_truncated_shard_is_read_up_to_the_end(tmp_path):
  whole = shard(tmp_path / "0.tar", range(10)).read_bytes()
  (tmp_path / "0.tar").write_bytes(whole[: len(whole) // 2])
  (tmp_path / "1.tar").write_bytes(b"not a tar at all" * 100)
  manifest = run(prepare.webdataset([f"{tmp_path}/?.tar"], "torn"), tmp_path)
  assert 3 <= manifest["kept"] <= 6
  assert manifest["rejected"]["truncated"] >= 2


def test_without_max_side_files_are_copied(tmp_path):
  shard(tmp_path / "0.tar", range(4))
  options = records.Options(None, shares=(("train", 1.0),))
  run(prepare.webdataset([f"{tmp_path}/0.tar"]), tmp_path, options)
  data = source(tmp_path, "conceptual_captions")
  assert [data.image(n) for n in range(4)] == [encoded(n) for n in range(4)]


def test_duplicates_of_another_shard_are_left_out(tmp_path):
  shard(tmp_path / "0.tar", range(5))
  shard(tmp_path / "1.tar", [7, 3, 8, 1])
  shard(tmp_path / "2.tar", [3, 1])
  manifest = run(prepare.webdataset([f"{tmp_path}/?.tar"], "twice"), tmp_path)
  assert (manifest["kept"], manifest["rejected"]) == (7, {"duplicate": 4})
  data = source(tmp_path, "captions/twice")
  expected = [f"caption {n}" for n in (0, 1, 2, 3, 4, 7, 8)]
  assert [c for record in data.captions() for c in record] == expected
  assert data.image(5) == encoded(7)
  lines = (tmp_path / "out/captions/twice/1.0.0/rejected.tsv").read_text().splitlines()[1:]
  assert [line.split("\t")[0] for line in lines] == [
    f"{s}.tar:{n:09d}.jpg" for s, n in ((1, 3), (1, 1), (2, 3), (2, 1))
  ]
  with pytest.raises(ValueError, match=r"1\.tar:000000003\.jpg: duplicate"):
    run(prepare.webdataset([f"{tmp_path}/?.tar"], "strict"), tmp_path, records.Options(strict=True))


def test_exact_copies_between_splits_are_reported_without_decoding(tmp_path):
  shard(tmp_path / "0.tar", range(5))
  shard(tmp_path / "1.tar", [7, 3])
  patterns = [f"train={tmp_path}/0.tar", f"test={tmp_path}/1.tar"]
  manifest = run(prepare.webdataset(patterns, "leak"), tmp_path, records.Options(None))
  assert manifest["kept"] == 7  # the splits are the user's
  assert manifest["near duplicates of train"] == {"test": 1}
  lines = (tmp_path / "out/captions/leak/1.0.0/near_duplicates.tsv").read_text().splitlines()
  assert lines[1:] == ["test\t000000003.jpg\t000000003.jpg\t0"]


def test_a_name_that_is_not_utf8(tmp_path):
  names = ["a\udcff.jpg", "a\udcff.txt"]  # the byte 0xff
  write_tar(tmp_path / "0.tar", zip(names, [encoded(0), b"a caption"], strict=True))
  run(prepare.webdataset([f"{tmp_path}/0.tar"], "names"), tmp_path)
  data = source(tmp_path, "captions/names")
  assert list(data.column("file")) == [b"a\\udcff.jpg"]
