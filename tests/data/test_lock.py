"""Concurrent runs create a file once."""

import concurrent.futures
import threading

import pytest
from etils import epath

from xe_retrieval.data import datasets, lock


def test_the_second_waits_until_the_first_is_done(tmp_path, capsys):
  path, found = epath.Path(tmp_path) / "table.npy", []

  def second():
    with lock.creating(path):
      found.append(path.exists())

  with lock.creating(path):
    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and "another run makes table.npy" in capsys.readouterr().out
    path.touch()
  thread.join(5)
  assert found == [True]
  assert list(tmp_path.iterdir()) == [tmp_path / "table.npy"]


def test_the_lock_is_released_after_an_error(tmp_path):
  path = epath.Path(tmp_path) / "table.npy"
  with pytest.raises(OSError, match="disk full"), lock.creating(path):
    raise OSError("disk full")
  with lock.creating(path):
    path.touch()
  assert list(tmp_path.iterdir()) == [tmp_path / "table.npy"]


def test_two_at_once_generate_a_data_set_once(tmp_path, monkeypatch):
  generated, both_wait = [], threading.Barrier(2, timeout=60)
  creating, generate = lock.creating, datasets.Shapes._generate_examples

  def creating_together(path):  # neither has found the data set when they compete for the lock
    both_wait.wait()
    return creating(path)

  def counted(builder, split):
    generated.append(split)
    return generate(builder, split)

  monkeypatch.setattr(lock, "creating", creating_together)
  monkeypatch.setattr(datasets.Shapes, "_generate_examples", counted)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    builders = list(pool.map(lambda _: datasets.builder("shapes/32", tmp_path), range(2)))
  assert [b.info.splits["train"].num_examples for b in builders] == [32, 32]
  assert generated == list(datasets.SPLITS)
