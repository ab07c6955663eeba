"""Thumbnails for the page: always decoded and re-encoded, an original file is never sent."""

import contextlib
import io
import threading

from PIL import Image, ImageOps

from xe_retrieval.preparation import image_files
from xe_retrieval.preparation.rejections import Rejected
from xe_retrieval.serving.limits import return_memory

SIDES = (320, 1280)
MAX_PIXELS = 100_000_000
_LARGE = 16_000_000  # pixels; decoded one picture at a time, as 100 million are up to 400 MB
_one_large = threading.Lock()
PLACEHOLDER = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">
<rect width="64" height="64" fill="#8884"/>
<path d="M14 46 26 30l8 10 6-7 10 13zM40 18a4 4 0 1 1 0 8 4 4 0 0 1 0-8z" fill="#8888"/>
<path d="m12 12 40 40" stroke="#888" stroke-width="3"/></svg>
"""


@contextlib.contextmanager
def checked(data: bytes):
  """For decoding what a stranger has sent: a known kind of file, not too large, and if large, one
  at a time; otherwise ValueError."""
  try:
    image = Image.open(io.BytesIO(data), formats=image_files.FORMATS)
    image_files.refuse_bombs(image, data, MAX_PIXELS)
  except Rejected as e:
    raise ValueError(f"{e.detail} are too many") from e
  except Exception as e:  # decoders raise many exception types on damaged files
    kinds = ", ".join(image_files.FORMATS)
    raise ValueError(f"it should be a file of one of the kinds {kinds}") from e
  with _room_for(image):
    yield


@contextlib.contextmanager
def _room_for(image):
  if image.width * image.height <= _LARGE:
    yield
    return
  with _one_large:
    yield
    return_memory()


def make(data: bytes, side: int) -> tuple[bytes, str]:
  """Image file -> (thumbnail file, media type); ValueError if it cannot be decoded.

  Of an animation, the first frame. Small images are not enlarged.
  """
  try:
    image = Image.open(io.BytesIO(data), formats=image_files.FORMATS)
    if image.width * image.height > MAX_PIXELS:
      raise ValueError("too many pixels")
    lossless = image.format == "PNG" or max(image.size) <= 128
    image.draft("RGB", (side, side))
    with _room_for(image):
      if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
      image.thumbnail((side, side))
    image = ImageOps.exif_transpose(image)
    image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    out = io.BytesIO()
    if image.mode == "RGBA" or lossless:
      image.save(out, "PNG")
      return out.getvalue(), "image/png"
    image.save(out, "JPEG", quality=85)
    return out.getvalue(), "image/jpeg"
  except Exception as e:  # decoders raise many exception types on damaged files
    raise ValueError(str(e)) from e
