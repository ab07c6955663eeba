"""One finished run of the tiny config, shared by all tests of training."""

import shutil

import jax
import pytest

from tests.conftest import tiny
from xe_retrieval import main


@pytest.fixture(scope="session")
def finished(data_dir, tmp_path_factory):
  """(workdir, state) of four steps on one device."""
  workdir = tmp_path_factory.mktemp("finished")
  return workdir, jax.device_get(main.train(tiny(data_dir), workdir, jax.devices()[:1]))


@pytest.fixture
def workdir(finished, tmp_path):
  """A copy of the finished run's directory that a test may change."""
  return shutil.copytree(finished[0], tmp_path / "run")
