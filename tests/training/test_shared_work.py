"""Two processes share work and merge it exactly: sums, joined rows, tables in numbered shards."""

import json

import numpy as np

from tests.training.test_processes import launch
from xe_retrieval.training import processes

MERGED = """
import json, pathlib, sys
import jax, numpy as np
from xe_retrieval.training import processes

processes.join()
me, root = jax.process_index(), pathlib.Path(sys.argv[1])
said = {}
said["total"] = processes.total(np.array([2**60 + me, 3, -(2**40)])).tolist()
said["joined"] = processes.joined(np.arange(me + 1) + 0.5).tolist()
some = np.full((3, 2), np.nan)
some[2 * me] = me + 0.25
said["known"] = processes.known(some).tolist()

processes.SHARD, computed = 1, []
def compute(batches):
  for batch in batches:
    computed.append(batch.start)
    yield np.stack([np.float32([i, i * i]) for i in range(batch.start, batch.stop)])
batches = [slice(i, min(i + 3, 14)) for i in range(0, 14, 3)]
for kind, directory in (("memory", None), ("shared", root / "one"), ("own", root / str(me))):
  computed.clear()
  shards = processes.shared_rows(batches, compute, directory)
  table = processes.assemble(batches, shards)
  said[kind] = [table.tolist(), list(computed)]
(root / f"{me}.json").write_text(json.dumps(said))
"""


def test_what_two_processes_merge(tmp_path):
  one = tmp_path / "one"
  one.mkdir()
  np.save(one / "000000003-3.npy", np.full((3, 2), 7, np.float32))  # of an interrupted run
  launch("-c", MERGED, str(tmp_path))
  said = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
  for each in said:
    # Neither JAX's 32 bits nor a float64 would hold it.
    assert each["total"] == [2**61 + 1, 6, -(2**41)]
    assert each["joined"] == [0.5, 0.5, 1.5]
    assert each["known"] == [[0.25, 0.25], [1.25, 1.25]]  # nobody knows row 1
  expected = np.float32([[i, i * i] for i in range(14)])
  resumed = expected.copy()
  resumed[3:6] = 7
  for each in said:
    np.testing.assert_array_equal(each["memory"][0], expected)
    np.testing.assert_array_equal(each["own"][0], expected)  # exchanged: no disk has all
    np.testing.assert_array_equal(each["shared"][0], resumed)
  assert [each["own"][1] for each in said] == [[0, 6, 12], [3, 9]]
  assert [each["shared"][1] for each in said] == [[0, 6, 12], [9]]


def test_one_process_resumes(tmp_path):
  def compute(batches):
    yield from (np.full((2, 1), batch.start, np.float32) for batch in batches)

  batches = [slice(i, i + 2) for i in range(0, 80, 2)]
  whole = processes.shared_rows(batches, compute, tmp_path)
  assert [len(shard) for shard in whole] == [32, 32, 16]
  again = processes.shared_rows(batches, lambda batches: iter(batches), tmp_path)
  np.testing.assert_array_equal(np.concatenate(whole), np.concatenate(again))
  order = np.random.default_rng(0).permutation(80)
  rows = [order[i : i + 2] for i in range(0, 80, 2)]
  table = processes.assemble(rows, whole)
  np.testing.assert_array_equal(table[order], np.concatenate(whole))
