"""Disks that fail, or are not mounted, and other workers: no vector is lost, no part done early."""

import errno
import os
import pathlib

import pytest

from tests.embed.conftest import BROKEN, HOSTILE, PICTURES
from tests.embed.test_part import change, embed, rows, same, skipped
from tests.search.conftest import draw
from xe_retrieval.data import image_folder, paths
from xe_retrieval.embed import __main__ as command
from xe_retrieval.embed import directory, embedded_source, embedding_loop, part
from xe_retrieval.search import image_sources
from xe_retrieval.search.update import update_index

EMPTY = "photos holds no pictures: is its disk mounted"


def test_an_empty_folder_is_a_disk_that_is_not_mounted(model, source, tmp_path):
  out, away = tmp_path / "out", tmp_path / "away"
  source.path.rename(away)
  source.path.mkdir()
  with pytest.raises(ValueError, match=EMPTY):
    part.run(model, source, out, 1, 1)
  assert not out.exists()
  source.path.rmdir()
  away.rename(source.path)
  part.run(model, source, out, 1, 1)
  before = rows(out)
  source.path.rename(away)
  source.path.mkdir()
  for update in (False, True):
    with pytest.raises(ValueError, match=EMPTY):
      part.run(model, source, out, 1, 1, update)
  same(rows(out), before)


def test_a_disk_that_is_unmounted_meanwhile(model, source, tmp_path):
  class Unmounted(image_sources.Folder):
    def read(self, name):
      if not (tmp_path / "away").exists():
        source.path.rename(tmp_path / "away")
        source.path.mkdir()
      return super().read(name)

  with pytest.raises(ValueError, match=EMPTY):
    part.run(model, Unmounted(source.path), tmp_path / "out", 1, 1)
  assert not directory.marker(tmp_path / "out", 1, 1).exists()


def test_a_folder_that_one_worker_cannot_list(model, source, tmp_path, monkeypatch):
  out, real, refused = tmp_path / "out", os.scandir, []

  def scandir(path):
    if refused and os.fsdecode(path).endswith("deeper/"):
      raise OSError(errno.EACCES, "Permission denied")
    return real(path)

  monkeypatch.setattr(os, "scandir", scandir)
  refused.append(True)
  parts = 3  # in only one of them is the name of the folder
  embed(model, source, out, parts)
  plan = directory.read_plan(out)
  for number in range(1, parts + 1):
    lines = directory.read_skipped(out, directory.read_done(out, plan, number))
    assert [line["name"] for line in lines].count("deeper/") == 1
  taken = embedded_source.EmbeddedSource(
    embedded_source.open_directory(out, model.fingerprint())
  ).skipped()
  assert sorted(name for name, _ in taken) == sorted([*BROKEN, "deeper/"])
  refused.clear()  # --update takes over what can be listed now
  embed(model, source, out, parts, update=True)
  assert len(rows(out)) == PICTURES + len(HOSTILE) and "deeper/" not in skipped(out)
  before = rows(out)
  refused.append(True)  # its vectors stay, of the others what has changed is taken over
  change(source.path)
  reports = embed(model, source, out, parts)
  assert sum(report.gone for report in reports) == 0
  embed(model, source, out, parts, update=True)
  assert before.keys() < rows(out).keys() and "deeper/" in skipped(out)
  refused.clear()
  embed(model, source, out, parts, update=True)
  embed(model, source, tmp_path / "expected", parts)
  same(rows(out), rows(tmp_path / "expected"))


@pytest.mark.parametrize("kind", [".parquet", ".json", ".jsonl"])
def test_a_disk_that_fails_for_a_while_is_no_damage(model, source, tmp_path, monkeypatch, kind):
  out = tmp_path / "out"
  part.run(model, source, out, 1, 1)
  before = rows(out)

  def fails(path):
    if path.suffix == kind and path.name != directory.PLAN:
      raise OSError(errno.EIO, "Input/output error", str(path))
    return pathlib.Path(path).read_bytes()

  def refused():
    files = {path: path.stat().st_ino for path in out.rglob("*")}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
      patch.setattr(type(directory.folder(out, 1, 1)), "read_bytes", fails)
      patch.setattr(type(directory.folder(out, 1, 1)), "read_text", lambda p: fails(p).decode())
      part.run(model, source, out, 1, 1)
    assert {path: path.stat().st_ino for path in out.rglob("*")} == files

  refused()
  if kind == ".parquet":
    directory.marker(out, 1, 1).unlink()  # as of a part that was interrupted
    refused()
  assert part.run(model, source, out, 1, 1).embedded == 0
  same(rows(out), before)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_a_picture_that_a_disk_does_not_give_now_is_not_skipped(model, source, tmp_path, code):
  class Failing(image_sources.Folder):
    def read(self, name):
      if name == "scene007.png":
        raise OSError(code, os.strerror(code))
      return super().read(name)

  with pytest.raises(OSError, match=f"{os.strerror(code)}.*photos/scene007.png"):
    part.run(model, Failing(source.path), tmp_path / "out", 1, 1)
  assert not directory.marker(tmp_path / "out", 1, 1).exists()


class Sectors(image_sources.Folder):
  """One picture gives EIO, the first `times` that it is read."""

  def __init__(self, path, times):
    super().__init__(path)
    self.times, self.reads = times, 0

  def read(self, name):
    if name == "scene007.png":
      self.reads += 1
      if self.reads <= self.times:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return super().read(name)


def test_a_bad_sector_is_skipped_and_a_disk_that_is_gone_is_not(
  model, source, workdir, tmp_path, monkeypatch
):
  monkeypatch.setattr(embedding_loop, "PAUSES", (0, 0))
  every = PICTURES + len(HOSTILE)
  out, index = tmp_path / "out", tmp_path / "index"
  reason = os.strerror(errno.EIO)
  with monkeypatch.context() as patch, pytest.raises(OSError, match=f"{reason}.*/scene007.png"):
    patch.setattr(image_folder, "disk_answers", lambda path: False)
    part.run(model, Sectors(source.path, 99), out, 1, 1)
  assert not directory.marker(out, 1, 1).exists()
  with monkeypatch.context() as patch, pytest.raises(OSError, match=f"{reason}.*/scene007.png"):
    patch.setattr(image_folder, "disk_answers", lambda path: False)
    update_index(index, model, workdir, [Sectors(source.path, 99)])
  part.run(model, Sectors(source.path, 2), tmp_path / "third", 1, 1)
  assert len(rows(tmp_path / "third")) == every
  part.run(model, Sectors(source.path, 3), out, 1, 1)
  assert len(rows(out)) == every - 1 and skipped(out)["scene007.png"] == reason
  report = update_index(index, model, workdir, [Sectors(source.path, 3)])
  assert report.images == every - 1
  assert (source.key, "scene007.png", reason) in report.skipped
  assert part.run(model, source, out, 1, 1).fresh == 0  # it is tried again where that is asked for
  part.run(model, source, out, 1, 1, update=True)
  assert len(rows(out)) == every and "scene007.png" not in skipped(out)
  assert update_index(index, model, workdir, [source]).images == every


def test_index_stops_where_a_disk_is_unmounted(model, source, workdir, tmp_path):
  class Unmounted(image_sources.Folder):
    def read(self, name):
      if not (tmp_path / "away").exists():
        source.path.rename(tmp_path / "away")
        source.path.mkdir()
      return super().read(name)

  with pytest.raises(ValueError, match=EMPTY):
    update_index(tmp_path / "index", model, workdir, [Unmounted(source.path)])


def test_what_another_worker_deletes_or_finishes_meanwhile(model, source, tmp_path, monkeypatch):
  out = tmp_path / "out"
  part.run(model, source, out, 1, 1)
  before, folder = rows(out), directory.folder(out, 1, 1)
  path = type(folder)

  def gone_before(name, suffix):
    """Another worker deletes a file of this suffix just before it is used."""
    real = getattr(path, name)

    def used(self, *given, **options):
      if self.suffix == suffix:
        pathlib.Path(self).unlink(missing_ok=True)
      return real(self, *given, **options)

    monkeypatch.setattr(path, name, used)

  (chunk,) = folder.glob("*.parquet")
  chunk.write_bytes(b"damaged")
  other = folder / f".000000-00000000.parquet.elsewhere-7.7{paths.PARTIAL}"
  other.write_bytes(b"has just been linked")
  rename = os.rename

  def gone_before_rename(path, aside):
    pathlib.Path(path).unlink(missing_ok=True)
    rename(path, aside)

  with monkeypatch.context():
    monkeypatch.setattr(os, "rename", gone_before_rename)
    gone_before("unlink", ".parquet")
    gone_before("stat", paths.PARTIAL)
    assert part.run(model, source, out, 1, 1).embedded == len(before)
    monkeypatch.undo()
  same(rows(out), before)
  assert not other.exists()
  draw(source.path, range(60, 61))
  monkeypatch.setattr(os, "rename", gone_before_rename)
  part.run(model, source, out, 1, 1, update=True)
  monkeypatch.undo()
  assert len(rows(out)) == len(before) + 1
  directory.marker(out, 1, 1).unlink()
  monkeypatch.setattr(directory.paths, "create", lambda *_: False)  # and deleted again
  with pytest.raises(ValueError, match="part 1/1 of .* was changed by another worker"):
    part.run(model, source, out, 1, 1)


def test_a_newer_marker_of_another_worker_stays(model, source, tmp_path):
  out, reports = tmp_path / "out", []
  part.run(model, source, out, 1, 1)
  marker = directory.marker(out, 1, 1)
  draw(source.path, range(60, 62))

  class Slow(image_sources.Folder):
    def entries(self, wanted=None):
      yield from super().entries(wanted)
      if wanted and not reports:  # all is looked at, and another worker takes it over
        reports.append(part.run(model, source, out, 1, 1, update=True))
        reports.append(os.stat(marker))

  report = part.run(model, Slow(source.path), out, 1, 1, update=True)
  assert reports[0].embedded == 2 and (report.embedded, report.fresh) == (0, 0)
  assert os.path.samestat(reports[1], os.stat(marker))
  assert report.done == reports[0].done and not directory.status(out).damaged
  assert not list(out.glob(f"*{paths.PARTIAL}"))


def test_the_exit_code_is_that_of_the_parts_asked_for(model, source, tmp_path, capsys):
  out = tmp_path / "out"
  part.run(model, source, out, 2, 3)
  assert [command._status(out, f"{i}/3") for i in (1, 2, 3)] == [1, 0, 1]
  assert command._status(out, "all/3") == command._status(out) == 1
  assert "missing: 1,3" in capsys.readouterr().out
  (chunk,) = directory.folder(out, 2, 3).glob("*.parquet")
  chunk.unlink()
  assert command._status(out, "2/3") == 1
  assert f"{chunk} is missing" in capsys.readouterr().out


def test_a_damaged_list_of_what_was_skipped_is_made_anew(model, source, tmp_path):
  out = tmp_path / "out"
  part.run(model, source, out, 1, 1)
  (path,) = directory.folder(out, 1, 1).glob("skipped-*.jsonl")
  whole = path.read_bytes()
  for damage in (whole[:-9], b"", whole.replace(b"words.png", b"verbs.png")):
    path.write_bytes(damage)
    assert f"{path} is damaged" in directory.status(out).damaged[1]
    assert part.run(model, source, out, 1, 1).embedded == 0
    assert path.read_bytes() == whole and not directory.status(out).damaged
