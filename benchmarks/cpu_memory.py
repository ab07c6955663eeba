"""Keeps freed memory in the process between calls on a CPU.

XLA's CPU backend allocates its workspace (0.8 GB for a training step of ResNet-50 at batch 8) anew
on every call. By default glibc maps and unmaps such blocks each time, and the page faults take a
fifth of the step.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # M_… of malloc.h


def keep():
  """Stops glibc from returning freed memory to the system; no effect without glibc."""
  if platform.libc_ver()[0] != "glibc":
    return
  mallopt = ctypes.CDLL(None).mallopt
  mallopt(_ARENA_MAX, 1)  # only the first arena can grow beyond 64 MB without mmap
  mallopt(_MMAP_MAX, 0)
  mallopt(_TRIM_THRESHOLD, -1)  # never shrink the heap
