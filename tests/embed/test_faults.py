"""Disks that fail or are not mounted, and other workers: no vector is lost, no part done too early."""

import pytest

from tests.embed.test_part import rows, same
from xe_retrieval.embed import directory, part
from xe_retrieval.search import image_sources

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
