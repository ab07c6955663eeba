"""Near-duplicate images of two splits, by the Hamming distance of 128-bit fingerprints."""

import numpy as np

DISTANCE = 7  # bits; any such pair agrees in at least one of 8 bands of 16 bits
_CANDIDATES = 1 << 20  # pairs compared at a time
_CROWD = 32  # comparing candidates takes this many times longer than a pair in a matrix product
_BLOCK = 1024, 32_768  # rows of a and of b whose product is in memory
_NONE = np.iinfo(np.int64).max


def find(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """uint8 [n, 16], [m, 16] -> int64 [p, 3]: row of a, its nearest row of b, bits apart."""
  best = np.full(len(a), _NONE)  # bits apart (high bits) and row of b (low 48)
  bands = [(_band(a, band), _band(b, band)) for band in range(8)]
  candidates = sum(np.bincount(theirs, minlength=1 << 16)[ours] for ours, theirs in bands)
  # Drawings and screens have bands in common with most others: those are compared with all.
  crowded = candidates > len(b) / _CROWD
  _compare_all(a, b, np.flatnonzero(crowded), best)
  for ours, theirs in bands:
    order = np.argsort(theirs, kind="stable")
    first = np.searchsorted(theirs[order], ours, "left")
    count = np.searchsorted(theirs[order], ours, "right") - first
    count[crowded] = 0
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


def _compare_all(a, b, rows, best):
  """Lowers `best` for these rows of a: bits that agree, less those that differ, are a product."""
  for i in range(0, len(rows), _BLOCK[0]):
    some = rows[i : i + _BLOCK[0]]
    ours = _signs(a[some])
    for j in range(0, len(b), _BLOCK[1]):
      product = ours @ _signs(b[j : j + _BLOCK[1]]).T
      nearest = product.argmax(1)  # of equally near ones, the first
      agree = product[np.arange(len(some)), nearest]
      bits = ((128 - agree) / 2).astype(np.int64)
      found = np.where(bits <= DISTANCE, bits << 48 | nearest + j, _NONE)
      best[some] = np.minimum(best[some], found)


def _signs(fingerprints):  # uint8 [n, 16] -> float32 [n, 128]
  return np.unpackbits(fingerprints, axis=1).astype(np.float32) * 2 - 1


def _band(fingerprints, band):
  return np.ascontiguousarray(fingerprints[:, 2 * band : 2 * band + 2]).view(np.uint16)[:, 0]
