"""How many cores this process may use: those of its affinity mask, within its cgroup's quota."""

import functools
import math
import os
import pathlib


@functools.cache
def available() -> int:
  """At least 1. (os.cpu_count() is the machine's: each of its jobs would start as many threads.)"""
  return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota())))


def quota(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
  """Cores that the cgroup, or one above it, is granted; infinite without a limit or cgroups."""
  root, limits = pathlib.Path(root), [math.inf]
  for line in _lines(own):
    _, controllers, path = line.split(":", 2)
    group = pathlib.PurePosixPath(path.lstrip("/"))
    for part in (group, *group.parents):
      if not controllers:  # version 2
        limits += [_share(*line.split()) for line in _lines(root / part / "cpu.max")]
      elif "cpu" in controllers.split(","):
        files = [root / "cpu" / part / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
        limits += [_share(*pair) for pair in zip(*map(_lines, files), strict=False)]
  return min(limits)


def _lines(path):
  try:
    return pathlib.Path(path).read_text().splitlines()
  except OSError:
    return []


def _share(quota, period):
  return math.inf if quota in ("max", "-1") else int(quota) / int(period)
