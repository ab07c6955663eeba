"""Encoded pictures (JPEG or PNG) → uint8 squares: where to cut, then decode and cut in one go."""

import numpy as np

from xe_retrieval.data import pictures
from xe_retrieval.data.cpu_tensorflow import tf

AUGMENTS = ("none", "random_resized_crop")
_GREY = {  # for what cannot be decoded
  "jpeg": tf.io.encode_jpeg(np.full((1, 1, 3), 127, np.uint8)).numpy(),
  "png": tf.io.encode_png(np.full((1, 1, 3), 127, np.uint8)).numpy(),
}


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


def decode(encoded, box, size: int, kind: str | None = None):
  """Part `box` of a picture, resized; string [], int32 [4] -> uint8 [size, size, 3]."""
  return decode_all([encoded], [box], size, kind)[0]


def decode_all(encoded: list, boxes: list, size: int, kind: str | None = None):
  """Parts of n pictures, resized; n strings, n int32 [4] -> uint8 [n, size, size, 3].

  `kind` is jpeg or png, None where only the files themselves can tell.
  """
  cuts = [_cut(*picture, kind) for picture in zip(encoded, boxes, strict=True)]
  # TensorFlow's own resizing takes as long as the decoding; OpenCV's a sixth.
  resize = lambda *cuts: np.stack([pictures.resize(cut, size, size) for cut in cuts])  # noqa: E731
  resized = tf.numpy_function(resize, cuts, tf.uint8, stateful=False)
  return tf.ensure_shape(resized, (len(cuts), size, size, 3))


def readable_or_grey(encoded, kind: str | None) -> np.ndarray:
  """Pictures that `decode` cannot decode become one grey pixel; bytes [n] -> bytes [n]."""

  def check(data):
    try:
      decode(data, np.array([0, 0, *_size(data)], np.int32), 8, kind)  # all of it
      return data
    except tf.errors.InvalidArgumentError:
      return _GREY[kind or "png"]

  return np.array([check(data) for data in encoded], object)


def _cut(encoded, box, kind):
  """string [], int32 [4] -> uint8 [height, width, 3]."""
  if kind:
    return {"jpeg": _jpeg, "png": _png}[kind](encoded, box)
  is_jpeg = tf.strings.substr(encoded, 0, 2) == b"\xff\xd8"
  return tf.cond(is_jpeg, lambda: _jpeg(encoded, box), lambda: _png(encoded, box))


def _jpeg(encoded, box):
  return tf.io.decode_and_crop_jpeg(encoded, box, channels=3)


def _png(encoded, box):
  y, x, height, width = tf.unstack(box)
  return tf.io.decode_png(encoded, channels=3)[y : y + height, x : x + width]


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
