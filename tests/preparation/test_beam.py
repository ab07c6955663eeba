"""Apache Beam makes the data set that local processes make, whatever happens to its workers."""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.preparation import hostile
from tests.preparation.conftest import encoded, source, write_table, write_tar
from xe_retrieval import prepare
from xe_retrieval.preparation import caption_tables, jobs, records
from xe_retrieval.preparation.rejections import REASONS

pytest.importorskip("apache_beam", reason="Apache Beam is not installed: pip install -e '.[beam]'")

from xe_retrieval.preparation import beam

DIRECT = beam.Settings("DirectRunner", ["--direct_num_workers=2"])
OPTIONS = records.Options(max_pixels=1_000_000)
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


def tree(directory):
  """{name: bytes} of all files below."""
  root = pathlib.Path(directory)
  return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def in_parts(job, count):
  """The job in units of `count` images; a table as small as a test's is otherwise one unit."""
  (unit,) = job.units
  starts = range(0, len(unit.samples), count)
  parts = [unit.samples[start : start + count] for start in starts]
  folders = [unit.folder.part([sample.file for sample in part]) for part in parts]
  return job._replace(units=[*map(records.TableUnit, folders, parts)])


def command(*arguments, beams=(), **kwargs):
  words = [sys.executable, "-m", "xe_retrieval.prepare", "--runner=DirectRunner", *arguments]
  return subprocess.Popen(
    [*words, "--", *beams], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
  )


def test_159_hostile_and_good_rows_become_the_same_data_set(tmp_path):
  table, photos = hostile.write(tmp_path)
  assert len(list(caption_tables.rows(table))) == hostile.ROWS
  job = in_parts(prepare.table(str(table), str(photos)), 20)
  assert len(job.units) >= 7
  manifest = prepare.prepare(job, tmp_path / "local", OPTIONS)
  twice = DIRECT._replace(arguments=[*DIRECT.arguments, "--direct_runner_bundle_repeat=1"])
  assert prepare.prepare(job, tmp_path / "beam", OPTIONS, beam_settings=twice) == manifest
  assert tree(tmp_path / "beam") == tree(tmp_path / "local")
  # The rows have what they should have, over several units.
  assert manifest["kept"] + sum(manifest["rejected"].values()) == hostile.ROWS
  assert manifest["rejected"].keys() == set(REASONS)
  assert manifest["near duplicates of train"].keys() == {"validation", "test"}
  assert manifest["near duplicates of train"]["validation"] >= 7
  rejected = (tmp_path / "beam/captions/t/1.0.0/rejected.tsv").read_text()
  assert rejected.count("in another part") == 2
  assert len(list((tmp_path / "beam/captions/t/1.0.0").glob("*train*"))) >= 7
  # A finished data set is not made again, and not mixed with another one.
  before = tree(tmp_path / "beam")
  assert prepare.prepare(job, tmp_path / "beam", OPTIONS, beam_settings=DIRECT) == manifest
  assert tree(tmp_path / "beam") == before
  with pytest.raises(ValueError, match="prepared from other files or with other options"):
    prepare.prepare(job, tmp_path / "beam", records.Options(8), beam_settings=DIRECT)


def test_units_of_every_source_are_packed_and_unpacked(tmp_path, photos):
  from xe_retrieval.preparation.beam import steps

  table = write_table(tmp_path / "t.tsv", [(f"{n}.jpg", f"caption {n}") for n in range(3)])
  tar = write_tar(tmp_path / "p.tar", [(p.name, p.read_bytes()) for p in photos.iterdir()])
  shard = write_tar(tmp_path / "0.tar", [("a.jpg", encoded(0)), ("a.txt", b"a")])
  made = [prepare.table(str(table), str(images)) for images in (photos, tar)]
  made += [prepare.webdataset([f"test={shard}"])]
  for job in made:
    packed = steps.pack(job.units[0])
    assert list(steps.unpack(packed).read()) == list(job.units[0].read())


@pytest.mark.slow
def test_a_killed_worker_and_the_same_command_again(tmp_path):
  """Two worker processes, of which one is killed. What was written before stays as it is."""
  for s in range(24):
    numbers = range(5 * s, 5 * s + 7)  # the last two of a shard are in the next one, too
    members = [(f"{n}.{e}", c) for n in numbers for e, c in (("jpg", image(n)), ("txt", b"a"))]
    write_tar(tmp_path / f"{s:02d}.tar", [*members, ("y.jpg", b"no image"), ("y.txt", b"y")])
  pattern = f"{tmp_path}/??.tar"
  job, work = prepare.webdataset([pattern], "w"), tmp_path / "beam/unfinished/captions_w"
  arguments = [f"--webdataset={pattern}", "--name=w", f"--out={tmp_path / 'beam'}"]
  killed = command(*arguments, beams=PROCESSES)
  eventually(lambda: list(work.glob("0*.json")), killed)
  os.kill(workers(killed.pid)[0], signal.SIGKILL)
  said = killed.communicate(timeout=200)[1].replace("\r", "\n").splitlines()
  assert killed.returncode == 1
  assert re.fullmatch(r"error: --runner=DirectRunner has stopped: .* to resume, .*logs", said[-1])
  assert not any("Traceback" in line or "INFO" in line for line in said)
  done = {p.name[:5] for p in work.glob("0*.json")}
  assert 1 <= len(done) < 24 and not (tmp_path / "beam/captions").exists()

  def inodes():
    return {p.name: p.stat().st_ino for p in work.iterdir() if p.name[:5] in done}

  kept, seen = inodes(), {}

  def register(*arguments):
    from xe_retrieval.data import datasets

    seen.update(inodes())
    return datasets.register(*arguments)

  with pytest.raises(ValueError, match="holds unfinished work .*max_side: 384 → 8"):
    beam.run(job, tmp_path / "beam", records.Options(8), register, DIRECT)
  manifest = beam.run(job, tmp_path / "beam", records.Options(), register, DIRECT)
  assert kept.items() <= seen.items()  # not written again
  assert prepare.prepare(job, tmp_path / "local", records.Options()) == manifest
  assert tree(tmp_path / "beam") == tree(tmp_path / "local")
  assert manifest["rejected"] == {"not an image": 24, "duplicate": 46}


def image(n):
  return encoded(n, 700)


def eventually(found, process):
  for _ in range(12_000):
    if found():
      return
    assert process.poll() is None, process.communicate()
    time.sleep(0.01)
  raise TimeoutError


def workers(pid):
  """Beam's workers among the descendants of a process."""
  parents, out = {}, []
  for about in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      parents[int(about.parent.name)] = int(about.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
      continue
  for child in parents:
    above = child
    while above in parents and above != pid:
      above = parents[above]
    words = pathlib.Path(f"/proc/{child}/cmdline")
    if above == pid and words.exists() and words.read_bytes().split(b"\0")[1:2] == [b"-m"]:
      out += [child] * (b"sdk_worker_main" in words.read_bytes())
  return out


@pytest.mark.slow
def test_a_bucket(tmp_path, bucket):
  """Table, images and data set under gs://: the shards are those of the files on a disk."""
  table, photos = small(tmp_path)
  for path in (table, *photos.iterdir()):
    upload(path, bucket / path.relative_to(tmp_path))
  flags = [f"--captions={bucket}/t.tsv", f"--images={bucket}/photos", "--shares=train=1"]
  done = command(*flags, f"--out={bucket}/out", beams=["--no_auth", "--direct_num_workers=1"])
  stdout, stderr = done.communicate(timeout=200)
  assert done.returncode == 0, stderr
  assert "captions/t: 12 pairs" in stdout and "left out, outside the folder: 1" in stdout
  made = bucket / "out/captions/t/1.0.0"
  job = prepare.table(str(table), str(photos))
  prepare.prepare(job, tmp_path / "local", records.Options(shares=(("train", 1.0),)))
  local = tree(tmp_path / "local/captions/t/1.0.0")
  found = {path.name: path.read_bytes() for path in made.iterdir() if not path.is_dir()}
  assert found.keys() == {name for name in local if "columns" not in name}
  del found["manifest.json"], local["manifest.json"]  # they have the paths
  rejected = [files["rejected.tsv"].partition(b"points to")[0] for files in (found, local)]
  assert rejected[0] == rejected[1] and rejected[0].count(b"\n") == 3
  assert all(found[name] == local[name] for name in found.keys() - {"rejected.tsv"})
  assert not (bucket / "out/unfinished").exists()
  # Copied to a disk, it is read as it is.
  copy = tmp_path / "out/captions/t/1.0.0"
  copy.mkdir(parents=True)
  for name, content in found.items():
    (copy / name).write_bytes(content)
  assert len(source(tmp_path, "captions/t")) == 12


def small(directory):
  photos = directory / "photos"
  (photos / "inner").mkdir(parents=True)
  for n in range(12):
    (photos / "inner" / f"{n}.jpg").write_bytes(encoded(n))
  rows = [(f"inner/{n}.jpg", f"caption {n}") for n in range(12)]
  rows += [("inner/../inner/0.jpg", "caption 0"), ("nowhere.jpg", "x"), ("../t.tsv", "x")]
  return write_table(directory / "t.tsv", rows), photos


def upload(path, target):
  for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
    if file.is_file():
      (target / file.relative_to(path) if path.is_dir() else target).write_bytes(file.read_bytes())


def test_errors_are_one_sentence(tmp_path, photos, monkeypatch):
  table = write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("nowhere.jpg", "b")])
  job = prepare.table(str(table), str(photos))
  run = dict(out=tmp_path / "out", beam_settings=DIRECT)
  with pytest.raises(ValueError, match=r"^t\.tsv:3: missing file: nowhere\.jpg \(No such"):
    prepare.prepare(job, options=records.Options(strict=True), **run)
  assert prepare.prepare(job, options=records.Options(), **run)["kept"] == 1
  shutil.rmtree(photos)
  photos.mkdir()
  (photos / "other.jpg").write_bytes(encoded(0))  # an empty folder would be a disk that is missing
  with pytest.raises(ValueError, match=r"nothing is left of captions/t: 2 missing file; first: t"):
    prepare.prepare(job, tmp_path / "other", records.Options(), beam_settings=DIRECT)
  full = prepare.table(str(table), str(photos))
  (tmp_path / "odd/unfinished/captions_t").mkdir(parents=True)
  (tmp_path / "odd/unfinished/captions_t/00000.json").mkdir()  # cannot be read
  with pytest.raises(ValueError, match=r"part 0: \w+: .*; run the same command to resume$"):
    prepare.prepare(full, tmp_path / "odd", records.Options(), beam_settings=DIRECT)
  wrong = {
    "--direct_num_wrkers=2": "there is no --direct_num_wrkers=2",
    "--direct_num_workers=x": "argument --direct_num_workers: invalid int value: 'x'",
  }
  for argument, sentence in wrong.items():
    with pytest.raises(ValueError, match=f"Beam's options, after --: {sentence}"):
      beam.Settings("DirectRunner", [argument]).options()
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"pip install -c constraints.txt -e '\.\[beam\]'"):
    prepare._beam(None, [])


def test_a_worker_that_does_not_see_the_input(tmp_path, photos, monkeypatch):
  """Its units are not finished without their images."""
  write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("1.jpg", "b")])
  members = [(f"{n}.jpg", (photos / f"{n}.jpg").read_bytes()) for n in range(2)]
  write_tar(tmp_path / "p.tar", members)
  write_tar(tmp_path / "0.tar", [members[0], ("0.txt", b"a"), members[1], ("1.txt", b"b")])
  monkeypatch.chdir(tmp_path)  # a worker has another one
  made = [prepare.table("t.tsv", x, f"n{i}") for i, x in enumerate((photos.name, "p.tar"))]
  made.append(prepare.webdataset(["train=0.tar"], "n2"))
  inputs = (photos, tmp_path / "p.tar", tmp_path / "0.tar")
  monkeypatch.chdir("/")
  for job, path in zip(made, inputs, strict=True):
    away = path.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=f"^{path} cannot be read on .*every worker has to see"):
      prepare.prepare(job, tmp_path / "out", records.Options(), beam_settings=DIRECT)
    assert not list((tmp_path / "out").glob("unfinished/*/0*.json"))
    if path == photos:  # a mount point without its disk
      path.mkdir()
      with pytest.raises(ValueError, match=f"^{path} cannot be read on "):
        prepare.prepare(job, tmp_path / "out", records.Options(), beam_settings=DIRECT)
      path.rmdir()
    away.rename(path)
    prepare.prepare(job, tmp_path / "out", records.Options(), beam_settings=DIRECT)


def test_a_local_run_that_was_killed_late_is_resumed(tmp_path):
  table, photos = hostile.write(tmp_path)
  job = in_parts(prepare.table(str(table), str(photos)), 20)

  def killed(*_):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    jobs.run(job, tmp_path / "beam", OPTIONS, killed)
  assert list((tmp_path / "beam/unfinished").rglob("*.unique"))
  prepare.prepare(job, tmp_path / "beam", OPTIONS, beam_settings=DIRECT)
  prepare.prepare(job, tmp_path / "local", OPTIONS)
  assert tree(tmp_path / "beam") == tree(tmp_path / "local")


def test_local_runs_do_not_import_beam(tmp_path, photos):
  table = write_table(tmp_path / "t.tsv", [("0.jpg", "a"), ("https://example.com/a.jpg", "b")])
  code = f"""
import sys
from xe_retrieval import prepare
prepare.table({str(table)!r}, {str(photos)!r})
sys.exit("apache_beam" in sys.modules)
"""
  subprocess.run([sys.executable, "-c", code], check=True)
