"""One image file → a JPEG that the pipeline can decode, and a fingerprint; or a reason why not."""

import errno
import io
import re

import cv2
import numpy as np
from PIL import Image, ImageOps

from xe_retrieval.preparation.rejections import Rejected

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 64 << 20
QUALITY = 90  # of JPEGs that are re-encoded
MAX_SCANS = 100  # a progressive JPEG has about ten; thousands would take hours to decode
# What a disk or a machine says that fails now: it tells nothing of a picture.
_PASSING = {
  *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
  *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}

Image.init()  # registers all FORMATS
cv2.setNumThreads(0)  # callers already use a process or thread per core


def check(data: bytes, max_side: int | None, max_pixels: int) -> tuple[bytes, bytes | None]:
  """An encoded image -> (JPEG in grey or RGB, fingerprint).

  Such a JPEG, upright and small enough, is kept byte for byte. Without `max_side` it is not decoded
  (only its header and end marker are checked) and has no fingerprint.
  """
  if len(data) > MAX_BYTES:
    raise Rejected("over the pixel limit", f"more than {MAX_BYTES >> 20} MB")
  try:
    return _check(data, max_side, max_pixels)
  except Rejected:
    raise
  except Image.DecompressionBombError as e:
    raise Rejected("over the pixel limit", _one_line(e)) from e
  except Exception as e:  # broken files make the decoders raise almost anything
    reason = "truncated" if data and "truncated" in str(e).lower() else "not an image"
    raise Rejected(reason, _one_line(e) if data else "the file is empty") from e


def is_passing(error: Exception) -> bool:
  """Whether a picture that could not be read because of it may be read later."""
  return isinstance(error, OSError) and error.errno in _PASSING


def fingerprint(image: Image.Image) -> bytes:
  """A 128-bit difference hash, which hardly changes under resizing and recompression."""
  small = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.BOX), np.int16)
  right = small[:8, 1:] > small[:8, :-1] + 2  # the margin ignores noise in flat areas
  down = small[1:, :8] > small[:-1, :8] + 2
  return np.packbits([right, down]).tobytes()


def resize(image: np.ndarray, width: int, height: int, out=None) -> np.ndarray:
  """uint8 [h, w, 3] -> uint8 [height, width, 3]: averages by whole factors, then bilinear."""
  rows, columns = image.shape[:2]
  down, across = max(rows // height, 1), max(columns // width, 1)
  if down > 1 or across > 1:
    image = image[: rows // down * down, : columns // across * across]
    image = cv2.resize(image, (columns // across, rows // down), interpolation=cv2.INTER_AREA)
  return cv2.resize(image, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)


def refuse_bombs(image: Image.Image, data: bytes, max_pixels: int) -> None:
  """Rejected, by its header, if decoding it would take too much memory or time."""
  width, height = image.size
  if width * height > max_pixels:
    raise Rejected("over the pixel limit", f"{width} x {height} pixels")
  if image.format == "JPEG" and (scans := data.count(b"\xff\xda")) > MAX_SCANS + len(data) // 65536:
    raise Rejected("over the pixel limit", f"{width} x {height} pixels in {scans:,} scans")


def _check(data, max_side, max_pixels):
  image = Image.open(io.BytesIO(data), formats=FORMATS)
  width, height = image.size
  refuse_bombs(image, data, max_pixels)
  small = max_side is None or max(width, height) <= max_side
  if small and _is_plain(image):
    if max_side is None and data.find(b"\xff\xd9", -4096) >= 0:
      return data, None
    image.draft("L", (32, 32))  # reads the whole file, decodes it at 1/8 of the size
    image.load()
    return data, fingerprint(image)
  if not small:
    scale = max_side / max(width, height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    image.draft(None, size)  # decodes a JPEG at 1/2, 1/4 or 1/8 if that is large enough
  image = upright_rgb(image)
  if not small:
    size = size if (image.width >= image.height) == (width >= height) else size[::-1]
    image = Image.fromarray(resize(np.asarray(image), *size))
  out = io.BytesIO()
  image.save(out, "JPEG", quality=QUALITY)
  return out.getvalue(), fingerprint(image)


def _is_plain(image):
  """Whether it is an upright JPEG in grey or RGB, which all decoders show alike."""
  plain = image.format == "JPEG" and image.mode in ("L", "RGB")
  return plain and image.getexif().get(0x0112, 1) == 1


def upright_rgb(image: Image.Image) -> Image.Image:
  """The first frame as RGB: EXIF orientation applied, transparency on white."""
  image.load()
  ImageOps.exif_transpose(image, in_place=True)
  if image.mode in ("I", "F") or image.mode.startswith("I;16"):
    values = np.asarray(image, np.float32)
    top = 65535 if values.max(initial=0) > 255 else 255
    image = Image.fromarray((values.clip(0, top) * (255 / top)).astype(np.uint8))
  if image.has_transparency_data:
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white
  return image if image.mode == "RGB" else image.convert("RGB")


def _one_line(e):
  text = re.sub(r" <_io\.BytesIO object at \w+>", "", str(e))  # the same in every process
  return " ".join(text.split())[:200] or type(e).__name__
