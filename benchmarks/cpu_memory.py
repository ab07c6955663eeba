"""Memory that is kept between calls on a CPU.

XLA's CPU backend asks the C library for its whole workspace (0.8 GB for a training step of
ResNet-50 at batch 8) anew on every call. By default glibc takes such memory from the system and
gives it back each time, and to fault its pages in takes a fifth of the step.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # M_… of malloc.h


def keep():
  """From now on, freed memory stays with the process. Without effect where there is no glibc."""
  if platform.libc_ver()[0] != "glibc":
    return
  mallopt = ctypes.CDLL(None).mallopt
  mallopt(_ARENA_MAX, 1)  # only the first arena can grow beyond 64 MB without mmap
  mallopt(_MMAP_MAX, 0)
  mallopt(_TRIM_THRESHOLD, -1)  # never give back
