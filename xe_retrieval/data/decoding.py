"""Encoded images (JPEG or PNG) → uint8 squares: where to crop, then decode, crop and resize."""

import dataclasses
import io
import os

import cv2
import numpy as np
from etils import epath
from PIL import ExifTags, Image

from xe_retrieval import config as config_lib
from xe_retrieval.preparation import image_files

AUGMENTS = ("none", "random_resized_crop")
DECODER = 2  # increment when a file decodes to other pixels: part of the key of cached features
# OpenCV decodes a JPEG in three quarters of the time that TensorFlow takes, and can do it at 1/2,
# 1/4 or 1/8 of the size. EXIF orientation has been applied before.
_RGB = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_REDUCED = {  # only the scale: the REDUCED_COLOR constants would also select BGR
  8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
  4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
  2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
}
MAX_PIXELS = 100_000_000  # larger images are refused before decoding
_GREY = 127  # stands in for images that cannot be decoded


@dataclasses.dataclass(frozen=True)
class View:
  """How a whole photo becomes a square of `size` pixels.

  crop      the largest square in the middle, resized
  shortest  resized until its shorter side has `shortest` pixels, the middle cropped: CLIP, DINOv2
  squash    resized without regard to its shape: SigLIP, ViT
  """

  size: int
  resize: str = "crop"
  shortest: int = 0
  resample: str = ""  # bicubic, …: by Pillow, as transformers does it; "": by image_files.resize

  @property
  def shape(self):
    return self.size, self.size, 3

  @classmethod
  def of(cls, image) -> "View | Views":
    """That of config.image; of a number, the crop of that size."""
    if isinstance(image, int | View | Views):
      return cls(image) if isinstance(image, int) else image
    if "towers" in image:
      return Views(tuple(cls.of(tower) for tower in config_lib.towers(image).values()))
    kind, resample = image.get("resize", "crop"), image.get("resample", "")
    if kind not in ("crop", "shortest", "squash"):
      raise ValueError(f"config.image.resize={kind!r}: expected one of crop, shortest, squash")
    if resample and not hasattr(Image.Resampling, resample.upper()):
      known = ", ".join(kind.name.lower() for kind in Image.Resampling)
      raise ValueError(f"config.image.resample={resample!r}: expected one of {known}")
    return cls(image.size, kind, image.get("shortest", 0) or image.size, resample)


@dataclasses.dataclass(frozen=True)
class Views:
  """Several views of one photo below each other in one array, each where `spans` says.

  Equal ones are there once.
  """

  views: tuple[View, ...]
  resize = "several"

  @property
  def shape(self):
    sizes = [view.size for view in dict.fromkeys(self.views)]
    return sum(sizes), max(sizes), 3

  @property
  def spans(self) -> tuple[tuple[int, int], ...]:
    """The first row and the size of each."""
    top, found = 0, {}
    for view in dict.fromkeys(self.views):
      found[view] = top, view.size
      top += view.size
    return tuple(found[view] for view in self.views)


def centres(encoded) -> np.ndarray:
  """The largest square in the middle; bytes [n] -> int32 [n, 4] y, x, height, width."""
  return _centres(_sizes(encoded))


def _centres(sizes):
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


def boxes(encoded, draws, augment: str, view: View | Views) -> np.ndarray:
  """Where training crops each image; bytes [n], int64 [n] -> int32 [n, 4]."""
  return random_crops(encoded, draws) if augment != "none" else whole(encoded, view)


def whole(encoded, view: View | Views) -> np.ndarray:
  """The boxes that evaluation takes: the centres; all zeros where `view` does it otherwise."""
  return centres(encoded) if view.resize == "crop" else np.zeros((len(encoded), 4), np.int32)


def decode(encoded: bytes, box, view, out: np.ndarray | None = None) -> np.ndarray:
  """Part `box`, int [4], of an image, resized -> uint8 `view.shape`; ValueError if broken.

  All zeros stand for the whole image, cropped as `view` says.
  """
  view = View.of(view)
  if isinstance(view, Views):
    out = np.empty(view.shape, np.uint8) if out is None else out
    for (top, size), one in dict(zip(view.spans, view.views, strict=True)).items():
      out[top : top + size, :size] = decode(encoded, whole([encoded], one)[0], one)
      out[top : top + size, size:] = 0  # beside it; `out` may hold an earlier photo
    return out
  box = [int(value) for value in box]
  jpeg = encoded[:2] == b"\xff\xd8" and not view.resample
  smaller = next((n for n in _REDUCED if jpeg and min(box[2:]) >= n * view.size), 1)
  data = np.frombuffer(encoded, np.uint8)
  try:
    image = cv2.imdecode(data, _RGB | _REDUCED.get(smaller, 0)) if data.size else None
  except cv2.error:
    image = None
  if image is None:
    raise ValueError("it cannot be decoded")
  return _part(image, [value // smaller for value in box], view, out)


def _part(image, box, view, out=None):  # uint8 [H, W, 3] -> uint8 [size, size, 3]
  y, x, height, width = box
  if not height and not width:
    return _fill(out, _viewed(image, view))
  part = image[y : y + height, x : x + width]
  if not part.size:
    raise ValueError("it is smaller than its header says")
  if view.resample:
    return _fill(out, _resize(part, view.size, view.size, view))
  return image_files.resize(part, view.size, view.size, out)


def _whole(image, view):  # uint8 [H, W, 3] -> uint8 view.shape
  """As `decode` of the whole image, in a lossless format."""
  if not isinstance(view, Views):
    crop = view.resize == "crop"
    return _part(image, _centres(np.array([image.shape[:2]]))[0] if crop else [0] * 4, view)
  out = np.zeros(view.shape, np.uint8)
  for (top, size), one in dict(zip(view.spans, view.views, strict=True)).items():
    out[top : top + size, :size] = _whole(image, one)
  return out


def _viewed(image, view):  # uint8 [H, W, 3] -> uint8 [size, size, 3]
  if view.resize == "squash":
    return _resize(image, view.size, view.size, view)
  height, width = image.shape[:2]
  short, long = sorted((height, width))
  long = int(view.shortest * long / short)  # cut off, as transformers does
  width, height = (view.shortest, long) if width <= height else (long, view.shortest)
  image = _resize(image, width, height, view)
  space = max(view.size - width, 0), max(view.size - height, 0)  # a crop beyond the image is black
  if any(space):
    sides = [(-(-n // 2), n - -(-n // 2)) for n in space[::-1]]
    image = np.pad(image, [*sides, (0, 0)])
  top, left = ((n - view.size) // 2 for n in image.shape[:2])
  return image[top : top + view.size, left : left + view.size]


def _resize(image, width, height, view):
  if not view.resample:
    return image_files.resize(image, width, height)
  kind = Image.Resampling[view.resample.upper()]
  return np.asarray(Image.fromarray(image).resize((width, height), kind))


def _fill(out, image):
  if out is None:
    return image
  out[...] = image
  return out


def decode_all(encoded, boxes, view: View | Views, out: np.ndarray, run=map) -> int:
  """Decodes into `out`, uint8 [n, *view.shape] -> the number of broken images.

  Broken images are grey: one bad file should not end a long run. `run` maps over parts of them.
  """

  def several(start):
    broken = 0
    for i in range(start, min(start + _AT_ONCE, len(encoded))):
      try:
        decode(encoded[i], boxes[i], view, out[i])
      except ValueError:
        out[i] = _GREY
        broken += 1
    return broken

  return sum(run(several, range(0, len(encoded), _AT_ONCE)))


def square(image, index=0, view: View | int = 224):  # -> uint8 [size, size, 3]
  """A file, its bytes, a uint8 array [H, W, 3] or a PIL image, cropped and resized."""
  view = View.of(view)
  path = isinstance(image, str | os.PathLike)
  name = repr(str(image)) if path else f"images[{index}]"
  try:
    if not path and not isinstance(image, bytes):
      return _whole(np.asarray(_pil(image, index).convert("RGB")), view)
    data = image if isinstance(image, bytes) else epath.Path(image).read_bytes()
    if (opened := _opened(data)) is None:
      return decode(data, whole([data], view)[0], view)
    return _whole(np.asarray(image_files.upright_rgb(opened)), view)
  except TypeError:
    raise
  except Exception as error:  # PIL raises almost anything
    if isinstance(error, ValueError) and str(error).startswith("images["):
      raise
    raise ValueError(f"{name} is not a readable image ({_line(error)})") from error


def _opened(data):
  """Bytes of an image file -> a PIL image; None of an upright JPEG or PNG, which `decode` reads."""
  image = Image.open(io.BytesIO(data))
  if image.width * image.height > MAX_PIXELS:
    raise ValueError(f"{image.width} x {image.height} pixels are over the limit")
  upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
  plain = image.format in ("JPEG", "PNG") and image.mode in ("RGB", "L") and upright
  return None if plain and not image.has_transparency_data else image


def _pil(image, index):
  if isinstance(image, Image.Image):
    return image
  if not isinstance(image, np.ndarray):
    kind = type(image).__name__
    raise TypeError(f"images[{index}] is {kind}; expected a path, a uint8 array or a PIL image")
  if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
    raise ValueError(
      f"images[{index}] is {image.dtype} {image.shape}; expected uint8 [height, width, 3]"
    )
  return Image.fromarray(image)


def _line(error):
  return (str(error).splitlines() or [type(error).__name__])[0]


_AT_ONCE = 8  # images per task of a thread: fewer switches between threads


def aligned(shape, dtype=np.uint8) -> np.ndarray:
  """An empty array at a multiple of 64 bytes, which JAX takes without a copy on a CPU."""
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  memory = np.empty(size + 64, np.uint8)
  start = -memory.ctypes.data % 64
  return memory[start : start + size].view(dtype).reshape(shape)


def _sizes(encoded):
  """float64 [n, 2]: heights and widths."""
  return np.array([_size(data) for data in encoded], np.float64).reshape(-1, 2)


def _size(data):
  """(height, width) from the header of a JPEG or PNG; (1, 1) if there is none."""
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
  """Four uniform numbers in [0, 1) from each draw; int64 [n] -> float64 [4, n]."""
  draws = np.asarray(draws, np.uint64)
  return np.stack([((draws >> np.uint64(s)) & np.uint64(0x7FFF)) / 2**15 for s in (0, 16, 32, 47)])
