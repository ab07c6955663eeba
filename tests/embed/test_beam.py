"""Parts by Apache Beam are those of the command, row for row."""

import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.embed.test_part import embed, rows, skipped

pytest.importorskip("apache_beam")


def by_beam(workdir, source, out, *options):
  from xe_retrieval.embed import beam_runner

  given = str(workdir), str(source.path), str(out), "all/3", "", False
  beam_runner.run(*given, "DirectRunner", options)


def same(found, expected):
  assert found.keys() == expected.keys()
  for name, (id, vector, stamp) in expected.items():
    assert (found[name][0], found[name][2]) == (id, stamp)
    np.testing.assert_allclose(found[name][1], vector, atol=1e-6)


def test_two_threads(workdir, model, source, tmp_path):
  by_beam(
    *(workdir, source, tmp_path / "beam", "--direct_num_workers=2"),
    "--direct_running_mode=multi_threading",
  )
  embed(model, source, tmp_path / "expected", 3)
  same(rows(tmp_path / "beam"), rows(tmp_path / "expected"))
  assert skipped(tmp_path / "beam") == skipped(tmp_path / "expected")
  by_beam(workdir, source, tmp_path / "beam")  # a bundle that is run again changes nothing
  same(rows(tmp_path / "beam"), rows(tmp_path / "expected"))


def test_a_failure_is_one_sentence(workdir, model, source, tmp_path):
  embed(model, source, tmp_path / "out", 2)
  with pytest.raises(ValueError, match=r"^\S*out is divided into 2 parts, not 3$"):
    by_beam(workdir, source, tmp_path / "out")
  with pytest.raises(ValueError, match="no_such_option"):
    by_beam(workdir, source, tmp_path / "other", "--no_such_option=3")


@pytest.mark.slow
def test_the_command_with_two_worker_processes(workdir, model, source, tmp_path):
  command = [
    *(sys.executable, "-m", "xe_retrieval.embed", f"--workdir={workdir}"),
    *(f"--images={source.path}", f"--out={tmp_path / 'beam'}", "--part=all/3"),
    *("--runner=DirectRunner", "--", "--direct_num_workers=2"),
    "--direct_running_mode=multi_processing",
  ]
  out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert out.returncode == 0 and "3 of 3 parts are done" in out.stdout, out.stderr
  embed(model, source, tmp_path / "expected", 3)
  same(rows(tmp_path / "beam"), rows(tmp_path / "expected"))
