"""What one request and all of them together may take; /api/about tells clients."""

import ctypes
import gc
import platform

LIMITS = {
  "query": 500,  # characters
  "batch": 64,  # queries per request
  "top": 200,
  "offset": 1_000_000,
  "export": 100_000,  # rows
  "waiting": 256,  # queued queries; also thumbnails being made
  "pictures": 32,  # queued
  "curves": 32,  # waited for
  "active": 1_024,  # requests being answered
  "address": 32_768,  # bytes: every option at its longest, percent-encoded
  "headers": 32_768,
  "body": 262_144,
  "picture": 16 << 20,
}


def return_memory():
  """Gives what was freed, an old index or a large picture, to the system; glibc would keep it."""
  gc.collect()
  if platform.libc_ver()[0] == "glibc":
    ctypes.CDLL(None).malloc_trim(0)
