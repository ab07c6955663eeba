"""Runs beside each other make a thing once."""

import threading

from etils import epath

from xe_retrieval.data import datasets
from xe_retrieval.data.alone import alone


def test_the_second_waits_until_the_first_is_done(tmp_path, capsys):
  path, found = epath.Path(tmp_path) / "table.npy", []

  def second():
    with alone(path):
      found.append(path.exists())

  with alone(path):
    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and "another run makes table.npy" in capsys.readouterr().out
    path.touch()
  thread.join(5)
  assert found == [True]


def test_two_at_once_draw_a_data_set_once(tmp_path):
  sizes = []

  def draw():
    sizes.append(datasets.builder("shapes/32", tmp_path).info.splits["train"].num_examples)

  threads = [threading.Thread(target=draw) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sizes == [32, 32]
