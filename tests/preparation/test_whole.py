"""Published whole or not at all: interruption, processes, other options, wrong arguments."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.preparation.conftest import contents, encoded, run, write_table, write_tar
from xe_retrieval import prepare
from xe_retrieval.preparation import claims, records

ALL_TRAIN_SMALL = records.Options(max_side=8, shares=(("train", 1.0),))


def table_of(tmp_path, photos, count=600):
  for n in range(20, count):
    (photos / f"{n}.jpg").write_bytes(encoded(n, 16))
  rows = [(f"{n}.jpg", f"caption {n}") for n in range(count)]
  return write_table(tmp_path / "t.tsv", rows)


def test_interrupted_and_continued_is_the_same_data_set(tmp_path, photos):
  job = prepare.table(table_of(tmp_path, photos), photos)
  assert len(job.units) == 3
  prepare.prepare(job, tmp_path / "whole", records.Options())

  class Interrupting:
    def read(self):
      yield from job.units[1].read()
      raise KeyboardInterrupt

  units = [job.units[0], Interrupting(), job.units[2]]
  with pytest.raises(KeyboardInterrupt):
    run(job._replace(units=units), tmp_path, records.Options())
  unfinished = tmp_path / "out/unfinished/captions_t"
  assert sorted(p.name for p in unfinished.glob("0*.json")) == ["00000.json"]
  assert not (tmp_path / "out/captions").exists()
  first = {p.stat().st_ino for p in unfinished.glob("00000*.array_record")}
  run(job, tmp_path, records.Options())
  end = "captions/t/1.0.0"
  assert contents(tmp_path / "whole" / end) == contents(tmp_path / "out" / end)
  assert first <= {p.stat().st_ino for p in (tmp_path / "out" / end).iterdir()}  # not written again


def test_two_processes_write_the_same_data_set_as_one(tmp_path, photos):
  job = prepare.table(table_of(tmp_path, photos), photos)
  for processes in (1, 2):
    prepare.prepare(job, tmp_path / str(processes), records.Options(), processes)
  one, two = (contents(tmp_path / p / "captions/t/1.0.0") for p in "12")
  assert one == two and len(one) == 9


def test_a_data_set_is_never_mixed_with_other_options(tmp_path, photos):
  job = prepare.table(write_table(tmp_path / "t.tsv", [("0.jpg", "a")]), photos)
  first = run(job, tmp_path)
  assert run(job, tmp_path) == first
  with pytest.raises(ValueError, match="prepared from other files or with other options"):
    run(job, tmp_path, records.Options(max_side=8))


@pytest.fixture
def half_done(tmp_path, photos):
  """A job of three units of which one is written."""
  job = prepare.table(table_of(tmp_path, photos), photos)

  class Interrupting:
    def read(self):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run(job._replace(units=[job.units[0], Interrupting(), job.units[2]]), tmp_path)
  return job


def test_a_differing_flag_does_not_delete_unfinished_work(tmp_path, half_done):
  sentence = r"captions_t holds unfinished work .*max_side: 384 → 8\); finish it with the former"
  with pytest.raises(ValueError, match=sentence):
    run(half_done, tmp_path, ALL_TRAIN_SMALL)
  unfinished = tmp_path / "out/unfinished/captions_t"
  assert (unfinished / "00000.json").exists()
  assert run(half_done, tmp_path)["kept"] == 600


def test_a_changed_image_is_noticed(tmp_path, photos, half_done):
  (photos / "5.jpg").write_bytes(encoded(999))
  again = prepare.table(tmp_path / "t.tsv", photos)
  with pytest.raises(ValueError, match="holds unfinished work .*the images have changed since"):
    run(again, tmp_path)
  run(half_done, tmp_path)
  with pytest.raises(ValueError, match="was prepared from other files .*images have changed since"):
    run(again, tmp_path)
  shutil.move(photos / "6.jpg", tmp_path / "6.jpg")
  with pytest.raises(ValueError, match="images have changed since"):
    run(prepare.table(tmp_path / "t.tsv", photos), tmp_path)


def test_a_changed_shard_is_noticed(tmp_path):
  members = [("0.jpg", encoded(0)), ("0.txt", b"a caption")]
  write_tar(tmp_path / "0.tar", members)
  run(prepare.webdataset([f"{tmp_path}/0.tar"], "w"), tmp_path)
  os.utime(tmp_path / "0.tar", (1, 1))
  with pytest.raises(ValueError, match="images have changed since"):
    run(prepare.webdataset([f"{tmp_path}/0.tar"], "w"), tmp_path)


def test_a_data_set_of_an_earlier_version_has_no_stamp_and_stays_prepared(tmp_path, photos):
  job = prepare.table(write_table(tmp_path / "t.tsv", [("0.jpg", "a")]), photos)
  first = run(job, tmp_path)
  path = tmp_path / "out/captions/t/1.0.0/manifest.json"
  del first["plan"]["made from"]["stamp"]
  path.write_text(json.dumps(first))
  assert run(job, tmp_path) == first


def test_two_runs_of_one_name_do_not_write_into_each_other(tmp_path, photos):
  job = prepare.table(write_table(tmp_path / "t.tsv", [("0.jpg", "a")]), photos)
  refused = []

  class Meanwhile:
    def read(self):
      with pytest.raises(ValueError) as error:
        run(job, tmp_path)
      refused.append(str(error.value))
      yield from job.units[0].read()

    where = job.units[0].where

  assert run(job._replace(units=[Meanwhile()]), tmp_path)["kept"] == 1
  assert re.fullmatch(
    rf"captions/t is being prepared by process {os.getpid()} on \S+ since [\d: -]+; wait for it, "
    "or choose another --name or --out",
    refused[0],
  )
  assert not (tmp_path / "out/unfinished").exists()
  other = prepare.table(tmp_path / "t.tsv", photos, "other")  # another name at the same time
  with claims.alone(tmp_path / "out/unfinished/captions_t", "captions/t"):
    assert run(other, tmp_path)["kept"] == 1


def test_clear_errors_for_wrong_arguments(tmp_path, photos):
  with pytest.raises(ValueError, match=r"no column 'caption', but image, text"):
    prepare.table(write_table(tmp_path / "t.tsv", [], ("image", "text")), photos)
  good = write_table(tmp_path / "t.tsv", [("x.jpg", "a")])
  with pytest.raises(ValueError, match="there is no such folder or tar"):
    prepare.table(good, tmp_path / "nothing")
  with pytest.raises(ValueError, match=r"nothing is left of captions/t: 1 missing file; first: t"):
    run(prepare.table(good, photos), tmp_path)
  with pytest.raises(ValueError, match=r"00007\.tar: there is no such file"):
    prepare.webdataset([f"{tmp_path}/{{00007..00009}}.tar"])
  with pytest.raises(ValueError, match=r"--webdataset=all=x\.tar: split 'all' should be like"):
    prepare.webdataset(["all=x.tar"])
  for wrong in ("train=0.5", "train", "train=1,", "train=x"):
    with pytest.raises(ValueError, match="--shares="):
      prepare.shares(wrong)


def test_the_command(tmp_path, photos):
  table = write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("nowhere.jpg", "b")])
  command = [sys.executable, "-m", "xe_retrieval.prepare", f"--captions={table}"]
  done = subprocess.run(
    [*command, f"--images={photos}", f"--out={tmp_path / 'out'}", "--shares=train=1"],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "captions/t: 1 pairs" in done.stdout and "left out, missing file: 1" in done.stdout
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert done.stderr.strip() == "error: --captions needs --images, the folder of the images"
