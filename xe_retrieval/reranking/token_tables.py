"""What the frozen towers of the first stage know of every token, cached like pooled features.

Two tables per split, beside those of training/features.py and made in the same way, as float16:

image   [records, places · width]: the grid of a ResNet, the patches of a ViT
text    [tokens of all captions, width]: those of a caption one after the other, without padding

Both are named by a hash of the tower, its settings, the records and the tokenizer or decoder.
"""

import functools
import hashlib
import json

import jax
import numpy as np

from xe_retrieval.data import decoding, pipeline
from xe_retrieval.towers import dual_encoder
from xe_retrieval.towers.families import side_by_side
from xe_retrieval.training import features

MULTIPLE = 8  # texts are padded to a multiple of this, so that few shapes are compiled


class Tokens:
  """Tokens of many texts, one after the other: [n of all, width]."""

  def __init__(self, table, lengths, starts=None):
    self._table = table
    self.lengths = np.maximum(lengths, 1)
    self._starts = np.cumsum(self.lengths) - self.lengths if starts is None else starts

  def __len__(self):
    return len(self.lengths)

  def of(self, rows):
    """Those of some texts."""
    return Tokens(self._table, self.lengths[rows], self._starts[rows])

  def padded(self, rows, length=0):
    """int [n] -> float16 [n, T, width], bool [n, T]; T holds the longest of them, or `length`."""
    lengths = self.lengths[rows]
    known = np.arange(length or padded_length(lengths)) < lengths[:, None]
    at = self._starts[rows][:, None] + np.arange(known.shape[1])
    out = np.zeros((*known.shape, self._table.shape[1]), np.float16)
    out[known] = self._table[at[known]]
    return out, known


def padded_length(lengths) -> int:
  return -(-int(lengths.max()) // MULTIPLE) * MULTIPLE


class Towers:
  """The towers of a dual encoder without its projections: texts and images -> tokens."""

  def __init__(self, config, variables, tokenizer):
    for encoder in ("text", "image"):
      if side_by_side.several(config, encoder):
        raise ValueError(
          "re-ranking reads the tokens of one text and one image tower; "
          f"config.{encoder}.pretrained names several"
        )
    self.config, self._tokenizer = config, tokenizer
    self._own = {
      encoder: {
        collection: {encoder: {"tower": tree}}
        for collection, tree in side_by_side.take(variables, encoder, ()).items()
      }
      for encoder in ("text", "image")
    }
    self._model = dual_encoder.unpooled(dual_encoder.from_config(config))
    self._run = functools.cache(self._make_run)  # compiled once

  @functools.cached_property
  def image_shape(self) -> tuple[int, int]:
    """(places, width) of an image's tokens."""
    view = decoding.View.of(self.config.image).shape
    pixels = jax.ShapeDtypeStruct((1, *view), np.uint8)
    apply = functools.partial(self._model.apply, self._own["image"], method="image_tokens")
    return jax.eval_shape(apply, pixels).shape[1:]

  @functools.cached_property
  def text_width(self) -> int:
    return self.config.text.width

  def text(self, captions) -> Tokens:
    """Tokens of a few captions, now."""
    ids = self._tokenizer(list(captions))
    lengths = self._tokenizer.lengths(ids)
    run, size = self._run("text")
    parts = [
      _flat(run(features.cut(ids, lengths, rows)), lengths[rows])
      for rows in np.array_split(np.arange(len(ids)), -(-len(ids) // size))
    ]
    return Tokens(np.concatenate(parts), lengths)

  def images(self, squares):
    """Batches of uint8 [n, H, W, 3] -> yields float16 [n, places, width]."""
    run, size = self._run("image")
    for batch in squares:
      for start in range(0, len(batch), size):
        yield run(batch[start : start + size]).astype(np.float16)

  def fingerprint(self) -> str:
    """A hash of both towers: a joint encoder understands the tokens of no others."""
    keys = [self._key(encoder, "") for encoder in ("text", "image")]
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:20]

  def tables(self, source) -> tuple[Tokens, np.ndarray]:
    """Cached tokens of a split: of its captions, and float16 [records, places, width]."""
    fingerprint = source.fingerprint()
    ids, lengths = features.token_ids(source, self._tokenizer)
    lengths = np.maximum(lengths, 1)
    compute = functools.partial(self._write_text, ids, lengths, source.split)
    text = features.cached(self._path("text", source, fingerprint), compute)
    compute = functools.partial(self._write_images, source)
    image = features.cached(self._path("image", source, fingerprint), compute)
    return Tokens(text, lengths), image.reshape(len(image), *self.image_shape)

  def _path(self, encoder, source, fingerprint):
    name = f"{source.split}-{encoder}-tokens-{self._key(encoder, fingerprint)}.npy"
    return features.directory(self.config) / name

  def _key(self, encoder, fingerprint):
    return features.key_of(self.config, self._own[encoder], self._tokenizer, fingerprint, encoder)

  def _write_images(self, source, path):
    run, size = self._run("image")
    view = decoding.View.of(self.config.image)

    def compute(spans):
      for images in pipeline.image_batches(source, view, spans):
        yield run(images).astype(np.float16).reshape(len(images), -1)

    places, width = self.image_shape
    spans = pipeline.spans(len(source), size)
    name = f"image tokens of {source.split}"
    features.write(path, spans, compute, places * width, np.float16, name)

  def _write_text(self, ids, lengths, split, path):
    """Rows of the table are tokens, so a batch is the rows of all tokens of some captions."""
    run, size = self._run("text")
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(ids)), lengths)
    batches = [
      np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in captions])
      for captions in features.by_length(lengths, size)
    ]

    def compute(batches):
      for rows in batches:
        captions = owner[rows[starts[owner[rows]] == rows]]  # those whose first token is a row
        yield _flat(run(features.cut(ids, lengths, captions)), lengths[captions])

    features.write(path, batches, compute, self.text_width, np.float16, f"text tokens of {split}")

  def _make_run(self, encoder):
    return features.runner(self._model, self._own[encoder], f"{encoder}_tokens")


def _flat(tokens, lengths):  # [n, T, width], int [n] -> float16 [sum of lengths, width]
  known = np.arange(tokens.shape[1]) < np.maximum(lengths, 1)[:, None]
  return tokens.astype(np.float16)[known]
