"""A folder of photos."""

import pytest

from tests.prepare.making import picture


@pytest.fixture
def photos(tmp_path):
  folder = tmp_path / "photos"
  folder.mkdir()
  for n in range(20):
    (folder / f"{n}.jpg").write_bytes(picture(n))
  return folder
