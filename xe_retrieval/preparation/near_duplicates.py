"""Near-duplicate images of two splits, by the Hamming distance of 128-bit fingerprints."""

import numpy as np

DISTANCE = 7  # bits; any such pair agrees in at least one of 8 bands of 16 bits
_CANDIDATES = 1 << 20  # pairs compared at a time
_NONE = np.iinfo(np.int64).max


def find(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """uint8 [n, 16], [m, 16] -> int64 [p, 3]: row of a, its nearest row of b, bits apart."""
  best = np.full(len(a), _NONE)  # bits apart (high bits) and row of b (low 48)
  for band in range(8):
    ours, theirs = _band(a, band), _band(b, band)
    order = np.argsort(theirs, kind="stable")
    first = np.searchsorted(theirs[order], ours, "left")
    count = np.searchsorted(theirs[order], ours, "right") - first
    borders = np.flatnonzero(np.diff(np.cumsum(count) // _CANDIDATES)) + 1
    for rows in np.split(np.arange(len(a)), borders):
      i = np.repeat(rows, count[rows])
      nth = np.arange(len(i)) - np.repeat(np.cumsum(count[rows]) - count[rows], count[rows])
      j = order[first[i] + nth]
      bits = np.bitwise_count(a[i] ^ b[j]).sum(1, dtype=np.int64)
      near = bits <= DISTANCE
      np.minimum.at(best, i[near], bits[near] << 48 | j[near])
  rows = np.flatnonzero(best != _NONE)
  return np.stack([rows, best[rows] & (1 << 48) - 1, best[rows] >> 48], 1)


def _band(fingerprints, band):
  return np.ascontiguousarray(fingerprints[:, 2 * band : 2 * band + 2]).view(np.uint16)[:, 0]
