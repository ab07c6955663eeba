"""Cores that a process may use, not those of the machine."""

import math
import os

import pytest

from xe_retrieval.preparation import cores


@pytest.fixture
def groups(tmp_path):
  """quota(files, lines of /proc/self/cgroup) of a made-up /sys/fs/cgroup."""

  def quota(files, *lines):
    for name, text in files.items():
      path = tmp_path / "cgroup" / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))
    return cores.quota(str(tmp_path / "cgroup"), str(tmp_path / "own"))

  return quota


def test_quota_of_cgroups(groups):
  assert groups({}, "0::/") == math.inf
  assert groups({"cpu.max": "max 100000\n"}, "0::/") == math.inf
  # A group is limited by those above it, too.
  files = {"a/cpu.max": "250000 100000\n", "a/b/cpu.max": "800000 100000\n"}
  assert groups(files, "0::/a/b") == 2.5


def test_quota_of_cgroups_version_1(groups):
  files = {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
  assert groups(files, "3:cpu,cpuacct:/job", "2:memory:/job") == 3
  files["cpu/job/cpu.cfs_quota_us"] = "-1\n"
  assert groups(files, "3:cpu,cpuacct:/job") == math.inf


@pytest.mark.parametrize(("allowed", "quota", "found"), [(8, 2.5, 3), (2, 64, 2), (4, 0.1, 1)])
def test_the_smaller_of_affinity_and_quota(allowed, quota, found, monkeypatch):
  monkeypatch.setattr(os, "cpu_count", lambda: 128)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
  monkeypatch.setattr(cores, "quota", lambda: quota)
  assert cores.available.__wrapped__() == found
