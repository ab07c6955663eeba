"""The scripts are at least shell."""

import pathlib
import subprocess

import pytest

from tests.conftest import ROOT

SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: pathlib.Path(s).name)
def test_shell_syntax(script):
  subprocess.run(["bash", "-n", script], check=True)
