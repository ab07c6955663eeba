"""Worker processes give the batches of one process, and never a hang or an orphan."""

import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import time

import chex
import pytest

from xe_retrieval import config as config_lib
from xe_retrieval.data import pipeline, tokenization
from xe_retrieval.data.cpu_tensorflow import tf
from xe_retrieval.data.feed import examples, pairs, workers
from xe_retrieval.preparation import cores


@pytest.fixture(scope="module")
def source(data_dir):
  return pipeline.Source("shapes/64", data_dir, "train")


@pytest.fixture(scope="module")
def tokenizer(source):
  return tokenization.train(source.captions().flat, 1000, 20)


@pytest.fixture
def config(config):
  config.data.augment = "random_resized_crop"
  return config


def batches(source, tokenizer, config, workers, **kwargs):
  config.data.workers = workers
  return pipeline.train_batches(source, tokenizer, config, **kwargs)


def children():
  """Processes that this one has started."""
  files = pathlib.Path("/proc/self/task").glob("*/children")
  return [int(pid) for file in files for pid in file.read_text().split()]


def gone(pid):
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True


def test_any_number_of_workers_gives_the_same_batches(source, tokenizer, config):
  whole = list(batches(source, tokenizer, config, 0))
  assert len(whole) == 4
  chex.assert_trees_all_equal(list(batches(source, tokenizer, config, 1)), whole)
  chex.assert_trees_all_equal(list(batches(source, tokenizer, config, 3, start=1)), whole[1:])
  half = list(batches(source, tokenizer, config, 2, start=3, process=1, processes=2))
  chex.assert_trees_all_equal(half, [{name: x[8:] for name, x in whole[3].items()}])


def test_a_worker_that_dies_is_reported_and_the_others_end(source, tokenizer, config):
  config.steps, before = 1_000, set(children())
  running = batches(source, tokenizer, config, 2)
  next(running)
  started = [pid for pid in children() if pid not in before]
  assert len(started) == 2
  os.kill(started[0], signal.SIGTERM)  # of a scheduler, to all: this process decides
  for _ in range(8):
    next(running)
  os.kill(started[1], signal.SIGKILL)
  with pytest.raises(ChildProcessError, match="worker 1 .* was killed by SIGKILL .* at step "):
    list(running)
  assert all(gone(pid) for pid in started)


def test_an_exception_of_a_worker_says_what_was_wrong(
  source, tokenizer, config, data_dir, tmp_path
):
  shutil.copytree(pathlib.Path(data_dir) / "shapes", tmp_path / "shapes")
  source = pipeline.Source("shapes/64", str(tmp_path), "train")
  (shard,) = tmp_path.rglob("*train*array_record*")
  shard.unlink()
  with pytest.raises(ChildProcessError, match=f"worker 0 .*failed: .*{shard.name}"):
    next(batches(source, tokenizer, config, 1))


_PARENT = """
import pickle, sys, time
from xe_retrieval.data.feed import workers
running = workers.batches(*pickle.load(open(sys.argv[1], "rb")), 2)
next(running)
print(*[worker._process.pid for worker in running.gi_frame.f_locals["running"]], flush=True)
time.sleep(60)
"""


def test_workers_end_with_their_parent_and_import_neither_tensorflow_nor_jax(
  source, tokenizer, config, tmp_path
):
  made = pairs.Pairs(source.records, tokenizer, config)
  (tmp_path / "task").write_bytes(pickle.dumps((made, range(1_000))))
  command = [sys.executable, "-c", _PARENT, str(tmp_path / "task")]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
    started = [int(pid) for pid in parent.stdout.readline().split()]
    mapped = pathlib.Path(f"/proc/{started[0]}/maps").read_text()
    parent.kill()
  assert "cv2" in mapped and "libtensorflow" not in mapped and "jaxlib" not in mapped
  deadline = time.monotonic() + 20
  while not all(gone(pid) for pid in started) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert len(started) == 2 and all(gone(pid) for pid in started)


def test_how_many_workers_by_default(monkeypatch):
  for available, expected in ((1, 0), (8, 0), (9, 7), (112, 110)):
    monkeypatch.setattr(cores, "available", lambda available=available: available)
    assert workers.count(-1) == expected
    assert workers.count(0) == 0 and workers.count(3) == 3


def test_a_run_goes_on_with_another_number_of_workers(config):
  other = config.copy_and_resolve_references()
  other.data.workers = 7
  assert not config_lib.difference(config, other)
  other.data.augment = "none"
  assert len(config_lib.difference(config, other)) == 1
  other.data.workers = -2
  with pytest.raises(ValueError, match=r"config\.data\.workers=-2 should be at least -1"):
    config_lib.validate(other)


def test_records_are_parsed_as_tensorflow_does():
  def feature(**values):
    return tf.train.Feature(
      **{k: getattr(tf.train, kind)(value=v) for k, (kind, v) in values.items()}
    )

  whole = {
    "image": feature(bytes_list=("BytesList", [b"\xff\xd8\x00"])),
    "captions": feature(bytes_list=("BytesList", [b"", "größe".encode(), b"c"])),
    "text_ids": feature(int64_list=("Int64List", [2**63 - 1, 0, -5])),
    "weights": feature(float_list=("FloatList", [0.5])),
    "none": feature(int64_list=("Int64List", [])),
  }
  record = tf.train.Example(features=tf.train.Features(feature=whole)).SerializeToString()
  image, captions, ids, none, absent = examples.parse(
    record, "image", "captions", "text_ids", "none", "absent"
  )
  assert list(image) == [b"\xff\xd8\x00"] and list(captions) == [b"", "größe".encode(), b"c"]
  assert list(ids) == [2**63 - 1, 0, -5] and not none and not absent
