"""Encoded pictures (JPEG or PNG) → uint8 squares: where to cut, then decode, cut and resize."""

import cv2
import numpy as np

from xe_retrieval.data import pictures

AUGMENTS = ("none", "random_resized_crop")
DECODER = 2  # counted up whenever the same file gives other pixels: cached features depend on it
# OpenCV decodes a JPEG in three quarters of the time that TensorFlow takes, and can do it at 1/2,
# 1/4 or 1/8 of the size. EXIF's orientation is for `prepare`, not for here.
_RGB = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_REDUCED = {  # bits to add to the others: those of the COLOR constants would ask for BGR as well
  8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
  4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
  2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
}
_GREY = 127  # for what cannot be decoded


def centres(encoded) -> np.ndarray:
  """The largest square in the middle; bytes [n] -> int32 [n, 4] y, x, height, width."""
  sizes = _sizes(encoded)
  side = sizes.min(1, keepdims=True)
  return np.concatenate([(sizes - side) // 2, side, side], 1).astype(np.int32)


def random_crops(encoded, draws) -> np.ndarray:
  """20–100 % of the area, never mirrored ("left" must stay left); int64 [n] -> int32 [n, 4]."""
  sizes = _sizes(encoded)
  area, shape, y, x = _uniform(draws)
  area = (0.2 + 0.8 * area) * sizes.prod(1)
  aspect = (4 / 3) ** (2 * shape - 1)  # width / height, from 3:4 to 4:3
  extent = np.sqrt(np.stack([area / aspect, area * aspect], 1)).round()  # [n, 2]
  extent = np.clip(extent, 1, sizes)
  begin = np.floor((sizes - extent + 1) * np.stack([y, x], 1))
  return np.concatenate([begin, extent], 1).astype(np.int32)


def decode(encoded: bytes, box, size: int, out: np.ndarray | None = None) -> np.ndarray:
  """Part `box`, int [4], of a picture, resized -> uint8 [size, size, 3]; ValueError if broken."""
  y, x, height, width = (int(value) for value in box)
  jpeg = encoded[:2] == b"\xff\xd8"
  smaller = next((n for n in _REDUCED if jpeg and min(height, width) >= n * size), 1)
  data = np.frombuffer(encoded, np.uint8)
  try:
    image = cv2.imdecode(data, _RGB | _REDUCED.get(smaller, 0)) if data.size else None
  except cv2.error:
    image = None
  if image is None:
    raise ValueError("it cannot be decoded")
  y, x, height, width = (value // smaller for value in (y, x, height, width))
  part = image[y : y + height, x : x + width]
  if not part.size:
    raise ValueError("it is smaller than its head says")
  return pictures.resize(part, size, size, out)


def decode_all(encoded, boxes, size: int, pool) -> tuple[np.ndarray, int]:
  """Parts of n pictures, by the threads of a pool -> uint8 [n, size, size, 3], how many are broken.

  Broken ones are grey: a long run should not end for a picture that was never decoded before.
  """
  out = _aligned((len(encoded), size, size, 3))

  def several(start):
    broken = 0
    for i in range(start, min(start + _AT_ONCE, len(encoded))):
      try:
        decode(encoded[i], boxes[i], size, out[i])
      except ValueError:
        out[i] = _GREY
        broken += 1
    return broken

  return out, sum(pool.map(several, range(0, len(encoded), _AT_ONCE)))


_AT_ONCE = 8  # pictures of a thread: they hand over to each other seldom


def _aligned(shape):
  """uint8, at an address that TensorFlow takes over without a copy."""
  memory = np.empty(int(np.prod(shape)) + 64, np.uint8)
  start = -memory.ctypes.data % 64
  return memory[start : start + int(np.prod(shape))].reshape(shape)


def _sizes(encoded):
  """float64 [n, 2]: heights and widths."""
  return np.array([_size(data) for data in encoded], np.float64).reshape(-1, 2)


def _size(data):
  """(height, width) from the head of a file; (1, 1) where there is none."""
  if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 24:
    return int.from_bytes(data[20:24]), int.from_bytes(data[16:20])
  at = 2
  while at + 9 < len(data) and data[at] == 0xFF:
    marker = data[at + 1]
    if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
      return int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9])
    at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
  return 1, 1


def _uniform(draws):
  """Four numbers in [0, 1) from each draw; int64 [n] -> float64 [4, n]."""
  draws = np.asarray(draws, np.uint64)
  return np.stack([((draws >> np.uint64(s)) & np.uint64(0x7FFF)) / 2**15 for s in (0, 16, 32, 47)])
