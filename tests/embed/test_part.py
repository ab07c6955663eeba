"""Parts of a collection: together they are the whole, whatever happens to the workers."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

import xe_retrieval
from tests.conftest import ROOT
from tests.embed.conftest import BROKEN, HOSTILE, PICTURES
from tests.search.conftest import draw, make_workdir
from xe_retrieval.embed import directory, part, vector_files
from xe_retrieval.search import image_sources


def rows(out):
  """{name: (id, vector, stamp)} of all parts; a picture that is there twice fails."""
  plan, found = directory.read_plan(out), {}
  for number in range(1, plan.parts + 1):
    done = directory.read_done(out, plan, number)
    for _, content in directory.read_files(out, plan, done):
      columns = content.select(["id", "name", "stamp_size", "stamp_time"]).to_pydict()
      vectors = vector_files.vectors(content)
      for i, name in enumerate(map(os.fsdecode, columns["name"])):
        assert name not in found
        stamp = columns["stamp_size"][i], columns["stamp_time"][i]
        found[name] = columns["id"][i], vectors[i], stamp
  return found


def skipped(out):
  plan = directory.read_plan(out)
  done = [directory.read_done(out, plan, i + 1) for i in range(plan.parts)]
  return {line["name"]: line["reason"] for d in done for line in directory.read_skipped(out, d)}


def embed(model, source, out, parts, **options):
  return [part.run(model, source, out, i + 1, parts, **options) for i in range(parts)]


def test_parts_are_the_whole(model, source, tmp_path):
  embed(model, source, tmp_path / "one", 1)
  reports = embed(model, source, tmp_path / "four", 4)
  whole, parts = rows(tmp_path / "one"), rows(tmp_path / "four")
  assert all(report.embedded > 3 for report in reports)
  assert len(whole) == PICTURES + len(HOSTILE) and set(HOSTILE) < whole.keys()
  assert whole.keys() == parts.keys()
  bad = {entry.name for entry in source.entries()} - whole.keys()
  assert (
    sorted(bad) == BROKEN == sorted(skipped(tmp_path / "four")) == sorted(skipped(tmp_path / "one"))
  )
  assert skipped(tmp_path / "one")["pipe.jpg"] == "no regular file"
  stamps = {entry.name: entry.stamp for entry in source.entries()}
  expected = model.embed_images([source.path / name for name in whole])
  for (name, (id, vector, stamp)), other in zip(whole.items(), expected, strict=True):
    assert id == image_sources.ids(source.key, [os.fsencode(name)])[0] and stamp == stamps[name]
    np.testing.assert_allclose(vector, other, atol=1e-6)
    np.testing.assert_allclose(vector, parts[name][1], atol=1e-6)
    assert parts[name][0] == id and parts[name][2] == stamp
  status = directory.status(tmp_path / "four")
  assert (status.done, status.pictures, status.skipped) == (4, len(whole), len(BROKEN))
  assert not status.missing and not status.damaged


def test_the_part_of_a_picture_is_that_of_its_name(source):
  parts = [directory.part_of(entry.name, 4) for entry in source.entries()]
  assert set(parts) == {1, 2, 3, 4}
  assert directory.part_of("caf\udce9.png", 1000) == 701  # never changes
  assert {directory.part_of(f"{i}", 7) for i in range(100)} == set(range(1, 8))


def test_only_what_is_wanted_is_looked_at(source):
  some = list(source.entries(lambda name: name.endswith(".gif")))
  assert some == [("gone.gif", (-1, -1))]
  every = list(source.entries())
  assert every == sorted(every) and source.count() == len(every)
  assert source.count(lambda name: directory.part_of(name, 4) == 1) == sum(
    directory.part_of(entry.name, 4) == 1 for entry in every
  )


def test_a_folder_that_cannot_be_listed_is_told(model, source, tmp_path, monkeypatch):
  real = os.scandir

  def scandir(path):
    if os.fsdecode(path).endswith("deeper/"):
      raise PermissionError(13, "Permission denied")
    return real(path)

  monkeypatch.setattr(os, "scandir", scandir)
  part.run(model, source, tmp_path / "out", 1, 1)
  assert skipped(tmp_path / "out")["deeper/"] == "a folder that cannot be listed"
  assert len(rows(tmp_path / "out")) == PICTURES - 10 + len(HOSTILE)


class Stopping(image_sources.Folder):
  """Stops at some picture; counts those that were read."""

  def __init__(self, path, after):
    super().__init__(path)
    self.after, self.reads = after, 0

  def read(self, name):
    self.reads += 1
    if self.reads > self.after:
      raise KeyboardInterrupt
    return super().read(name)


def test_goes_on_after_an_interruption(model, source, tmp_path, monkeypatch):
  monkeypatch.setattr(part, "CHUNK", 8)
  monkeypatch.setattr(part.embedding_loop.models, "BATCH", 8)
  out, expected = tmp_path / "out", tmp_path / "expected"
  with pytest.raises(KeyboardInterrupt):
    part.run(model, Stopping(source.path, 40), out, 1, 1)
  assert not directory.marker(out, 1, 1).exists()
  kept = len(list(directory.folder(out, 1, 1).glob("*.parquet")))
  assert 2 <= kept <= 5
  again = Stopping(source.path, 1000)
  report = part.run(model, again, out, 1, 1)
  total = PICTURES + len(HOSTILE)
  assert report.embedded < total - 8 and again.reads == report.embedded + len(BROKEN)
  part.run(model, source, expected, 1, 1)
  same(rows(out), rows(expected))
  finished = Stopping(source.path, 0)
  report = part.run(model, finished, out, 1, 1)
  assert str(report) == f"part 1/1 is done: {total} pictures, {len(BROKEN)} files skipped"
  assert finished.reads == 0


def same(found, expected):
  assert found.keys() == expected.keys()
  for name, (id, vector, stamp) in expected.items():
    assert (found[name][0], found[name][2]) == (id, stamp)
    np.testing.assert_allclose(found[name][1], vector, atol=1e-6)


def change(photos):
  """Two new ones, one that is changed, one gone."""
  draw(photos, range(60, 62))
  Image.new("RGB", (50, 40), "red").save(photos / "scene001.png")
  (photos / "scene002.png").unlink()


def test_pictures_that_change_while_a_part_is_interrupted(model, source, tmp_path, monkeypatch):
  monkeypatch.setattr(part, "CHUNK", 8)
  monkeypatch.setattr(part.embedding_loop.models, "BATCH", 8)
  with pytest.raises(KeyboardInterrupt):
    part.run(model, Stopping(source.path, 45), tmp_path / "out", 1, 1)
  change(source.path)
  part.run(model, source, tmp_path / "out", 1, 1)
  part.run(model, source, tmp_path / "expected", 1, 1)
  same(rows(tmp_path / "out"), rows(tmp_path / "expected"))
  names = {path.name for path in directory.folder(tmp_path / "out", 1, 1).iterdir()}
  done = directory.read_done(tmp_path / "out", directory.read_plan(tmp_path / "out"), 1)
  assert names == {*done.files, done.skipped_file}


def test_pictures_that_change_after_a_part_is_done(model, source, tmp_path):
  embed(model, source, tmp_path / "out", 2)
  change(source.path)
  before = rows(tmp_path / "out")
  told = [str(report) for report in embed(model, source, tmp_path / "out", 2)]
  numbers = [re.search(r"since then (\d) are new or changed and (\d) gone", t) for t in told]
  counts = np.array([[int(n) for n in found.groups()] for found in numbers if found]).sum(0)
  assert counts.tolist() == [3, 2] and any("--update takes over" in t for t in told)
  same(rows(tmp_path / "out"), before)  # nothing was done about it
  reports = embed(model, source, tmp_path / "out", 2, update=True)
  assert sum(report.embedded for report in reports) == 3
  embed(model, source, tmp_path / "expected", 2)
  same(rows(tmp_path / "out"), rows(tmp_path / "expected"))
  assert sum(report.embedded for report in embed(model, source, tmp_path / "out", 2)) == 0


def test_what_does_not_belong_there_is_refused(model, source, tmp_path):
  part.run(model, source, tmp_path / "out", 1, 2)
  with pytest.raises(ValueError, match="out is divided into 2 parts, not 3"):
    part.run(model, source, tmp_path / "out", 1, 3)
  draw(tmp_path / "more", range(2))
  more = image_sources.Folder(tmp_path / "more")
  with pytest.raises(ValueError, match="out holds embeddings of 'folder:.*photos', not of 'fol"):
    part.run(model, more, tmp_path / "out", 2, 2)
  (tmp_path / "other").mkdir()
  other = xe_retrieval.load(make_workdir(tmp_path / "other", seed=1))
  with pytest.raises(ValueError, match="holds embeddings of another model .*take another --out"):
    part.run(other, source, tmp_path / "out", 2, 2)
  (tmp_path / "out" / "embedding.json").write_text("{")
  with pytest.raises(ValueError, match="embedding.json is damaged"):
    part.run(model, source, tmp_path / "out", 2, 2)
  for text in ("0/4", "5/4", "1", "all", "1/0", "-1/4", "a/b"):
    with pytest.raises(ValueError, match="should be like 1/4"):
      directory.parse_part(text)


def test_damage_is_told_and_made_anew(model, source, tmp_path, capsys):
  out = tmp_path / "out"
  embed(model, source, out, 2)
  before = rows(out)
  (file,) = directory.folder(out, 2, 2).glob("*.parquet")
  whole = file.read_bytes()
  middle = len(whole) // 2
  flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
  for damage, sentence in ((flipped, "is damaged (its checksum"), (whole[:-9], "is damaged")):
    file.write_bytes(damage)
    with pytest.raises(ValueError, match=re.escape(sentence)):
      rows(out)
    assert part.run(model, source, out, 2, 2).embedded > 5
    assert sentence in capsys.readouterr().err
    same(rows(out), before)
    (file,) = directory.folder(out, 2, 2).glob("*.parquet")
  file.unlink()
  assert f"{file.name} is missing" in directory.status(out).damaged[2]
  part.run(model, source, out, 2, 2)
  directory.marker(out, 1, 2).write_text('{"part": 1}')
  assert "00001-of-00002.json is damaged" in directory.status(out).damaged[1]
  assert part.run(model, source, out, 1, 2).embedded == 0  # its chunks are intact
  same(rows(out), before)


def test_a_disk_that_is_gone_is_not_a_folder_of_broken_pictures(model, source, tmp_path):
  class Unmounted(image_sources.Folder):
    def read(self, name):
      if source.path.exists():
        source.path.rename(tmp_path / "elsewhere")
      return super().read(name)

  with pytest.raises(ValueError, match="photos is no folder any more"):
    part.run(model, Unmounted(source.path), tmp_path / "out", 1, 1)
  assert not directory.marker(tmp_path / "out", 1, 1).exists()


def test_leftovers_of_a_killed_writer_go(model, source, tmp_path):
  folder = directory.folder(tmp_path / "out", 1, 1)
  folder.mkdir(parents=True)
  host = os.uname().nodename
  ended = folder / f".000000-00000000.parquet.{host}-999999999.7.tmp"
  alive = folder / f".000000-00000000.parquet.{host}-{os.getpid()}.7.tmp"
  for path in (ended, alive):
    path.write_bytes(b"half")
  part.run(model, source, tmp_path / "out", 1, 1)
  assert not ended.exists() and alive.exists()


def _run_in_child(workdir, photos, out, ready):
  model = xe_retrieval.load(workdir)
  ready.wait()
  part.CHUNK = 8
  part.run(model, image_sources.Folder(photos), out, 1, 1)


@pytest.mark.slow
def test_two_workers_on_one_part_at_once(workdir, source, tmp_path):
  context = multiprocessing.get_context("spawn")
  ready = context.Barrier(2)
  given = workdir, source.path, tmp_path / "out", ready
  workers = [context.Process(target=_run_in_child, args=given) for _ in range(2)]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join(120)
    assert worker.exitcode == 0
  assert len(rows(tmp_path / "out")) == PICTURES + len(HOSTILE)


def command(*arguments, **options):
  line = [sys.executable, "-m", "xe_retrieval.embed", *map(str, arguments)]
  return subprocess.Popen(
    line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
  )


@pytest.mark.slow
def test_the_command_is_stopped_and_goes_on(workdir, source, tmp_path):
  draw(source.path / "many", range(100, 700))
  out = tmp_path / "out"
  given = f"--workdir={workdir}", f"--images={source.path}", f"--out={out}"
  running = command(*given, "--part=1/2")
  while not (out / "embedding.json").exists() and running.poll() is None:
    time.sleep(0.05)
  running.send_signal(signal.SIGTERM)
  _, said = running.communicate(timeout=120)
  assert running.returncode == 143 and "the same command goes on from there" in said
  assert "Traceback" not in said
  assert not [p for p in out.rglob("*") if p.name.endswith(".tmp")]
  status = command(f"--out={out}")
  words, _ = status.communicate(timeout=120)
  assert status.returncode == 1 and " of 2 parts are done" in words and "missing: " in words
  again = command(*given, "--part=all/2")
  words, said = again.communicate(timeout=240)
  assert again.returncode == 0 and words.count("is done: ") == 2
  assert r"skipped 'words.png': not a readable image" in said
  status = command(f"--out={out}")
  words, _ = status.communicate(timeout=120)
  assert status.returncode == 0 and f"{PICTURES + len(HOSTILE) + 600} pictures, 4 files" in words
  assert len(rows(out)) == PICTURES + len(HOSTILE) + 600
  assert json.loads((out / "embedding.json").read_text())["parts"] == 2


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--out=nowhere"], "nowhere holds no embeddings; python -m xe_retrieval.embed"),
    (["--out=x", "--part=1/2"], "--part=1/2 needs --workdir=…"),
    (["--out=x", "--images=y"], "which part? --part=1/4 is the first of four"),
    (["--out=x", "--", "--direct_num_workers=2"], "--direct_num_workers=2 is an option of Beam"),
    (["--out=s3://x/y"], "s3://"),
  ],
)
def test_wrong_arguments(arguments, sentence):
  running = command(*arguments)
  _, said = running.communicate(timeout=120)
  assert running.returncode == 1 and sentence in said and "Traceback" not in said
