"""A trained model in Python: captions and pictures in, unit vectors out."""

import concurrent.futures
import functools
import io
import os

import numpy as np
from etils import epath
from PIL import ExifTags, Image, ImageOps

from xe_retrieval import exported
from xe_retrieval.data import images
from xe_retrieval.retrieval import embed
from xe_retrieval.towers import dual_encoder

MAX_PIXELS = 100_000_000  # of a file; more are refused before they are decoded


def load(path, which="best"):
  """The model of a workdir (its best or latest checkpoint) or of an exported directory."""
  path = epath.Path(path).expanduser()
  return Model(exported.read(path) if exported.is_exported(path) else embed.restore(path, which))


class Model:
  """Both towers with their weights, over all local devices."""

  def __init__(self, encoder: embed.Encoder):
    self.config, self.step = encoder.config, encoder.step
    self.tokenizer, self.variables = encoder.tokenizer, encoder.variables
    self.fingerprint = functools.cache(encoder.fingerprint)  # () -> str
    self._encoders = functools.cache(self._encoder)

  def embed_text(self, captions, progress=None) -> np.ndarray:
    """Strings [n] -> float32 [n, D], unit norm; a progress bar if it takes long."""
    captions = _sequence(captions, "captions")
    for i, caption in enumerate(captions):
      if not isinstance(caption, str):
        raise TypeError(f"captions[{i}] is {type(caption).__name__}; expected a string")
    parts = [
      encoder.embed_text(captions[part], _progress(progress, captions))
      for encoder, part in self._split(len(captions))
    ]
    return self._joined(parts)

  def embed_images(self, pictures, progress=None) -> np.ndarray:
    """Files, uint8 arrays [H, W, 3] or PIL images [n] -> float32 [n, D], unit norm.

    Cut to the square in the middle and resized, as in evaluation.
    """
    pictures = _sequence(pictures, "pictures")
    parts = [
      encoder.embed_pictures(
        self._squares(pictures, part), part.stop - part.start, _progress(progress, pictures)
      )
      for encoder, part in self._split(len(pictures))
    ]
    return self._joined(parts)

  def embed_squares(self, batches, count) -> np.ndarray:
    """Batches of at most `embed.BATCH` `square`s, `count` at most in all -> float32 [n, D]."""
    batch = min(embed.BATCH, 1 << max(count - 1, 0).bit_length())
    return self._encoders(batch).embed_pictures(batches, count)

  def _squares(self, pictures, part):
    """Batches of uint8 [≤ BATCH, size, size, 3], made by as many threads as there are cores."""
    cut = functools.partial(square, size=self.config.image.size)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      for start in range(part.start, part.stop, embed.BATCH):
        rows = range(start, min(start + embed.BATCH, part.stop))
        yield np.stack(list(pool.map(cut, (pictures[i] for i in rows), rows)))

  def _split(self, count):
    """Whole batches, then what is left in the smallest power of two that holds it."""
    whole = count // embed.BATCH * embed.BATCH
    if whole:
      yield self._encoders(embed.BATCH), slice(0, whole)
    if count > whole:
      bucket = 1 << (count - whole - 1).bit_length()
      yield self._encoders(bucket), slice(whole, count)

  def _encoder(self, batch):
    model = dual_encoder.from_config(self.config)
    return embed.Encoder(self.config, model, self.variables, self.tokenizer, batch=batch)

  def _joined(self, parts):
    return np.concatenate([np.zeros((0, self.config.embedding_dim), np.float32), *parts])


def square(picture, index=0, size=224):  # -> uint8 [size, size, 3]
  """A file, its bytes, a uint8 array [H, W, 3] or a PIL image, cut and resized as in evaluation.

  By way of an encoded picture: what evaluation decodes.
  """
  path = isinstance(picture, str | os.PathLike)
  name = repr(str(picture)) if path else f"pictures[{index}]"
  try:
    if path or isinstance(picture, bytes):
      data = _upright(picture if isinstance(picture, bytes) else epath.Path(picture).read_bytes())
    else:
      data = _png(_image(picture, index))
    return images.decode(data, images.centres([data])[0], size)
  except TypeError:
    raise
  except Exception as error:  # whatever PIL raises
    if isinstance(error, ValueError) and str(error).startswith("pictures["):
      raise
    raise ValueError(f"{name} is not a readable picture ({_line(error)})") from error


def _upright(data):
  """Bytes of any picture -> bytes of a JPEG or PNG, upright."""
  image = Image.open(io.BytesIO(data))
  if image.width * image.height > MAX_PIXELS:
    raise ValueError(f"{image.width} x {image.height} pixels are over the limit")
  upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
  plain = image.format in ("JPEG", "PNG") and image.mode in ("RGB", "L") and upright
  return data if plain else _png(ImageOps.exif_transpose(image))


def _image(picture, index):
  if isinstance(picture, Image.Image):
    return picture
  if not isinstance(picture, np.ndarray):
    kind = type(picture).__name__
    raise TypeError(f"pictures[{index}] is {kind}; expected a path, a uint8 array or a PIL image")
  if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
    raise ValueError(
      f"pictures[{index}] is {picture.dtype} {picture.shape}; expected uint8 [height, width, 3]"
    )
  return Image.fromarray(picture)


def _png(image):
  out = io.BytesIO()
  image.convert("RGB").save(out, "PNG", compress_level=1)
  return out.getvalue()


def _line(error):
  return (str(error).splitlines() or [type(error).__name__])[0]


def _sequence(items, name):
  if isinstance(items, str | os.PathLike | np.ndarray | Image.Image):
    raise TypeError(f"{name} should be a list; for a single one, pass [{name[:-1]}]")
  return list(items)


def _progress(progress, items):
  return len(items) > embed.BATCH if progress is None else progress
