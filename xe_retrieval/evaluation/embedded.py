"""A data set embedded by a model: what evaluation starts from."""

import dataclasses
from collections.abc import Callable

import numpy as np

from xe_retrieval.data import pipeline
from xe_retrieval.model import Encoder


@dataclasses.dataclass(frozen=True)
class Images:
  """A gallery, or distractors beside it, with what is known of each image."""

  vectors: np.ndarray  # float32 [M, D], unit norm
  captions: list[list[str]] | None = None  # [M]
  scenes: np.ndarray | None = None  # int8 [M, 3, 4], of drawn scenes
  names: list[str] | None = None  # [M], file names, where the data set has them


@dataclasses.dataclass(frozen=True)
class Pairs:
  text: np.ndarray  # float32 [Q, D], unit norm
  images: Images
  image_of_text: np.ndarray  # int64 [Q], row of `images` that caption q belongs to
  captions: list[str]  # [Q]
  encoded: Callable[[int], bytes]  # image m as a PNG or JPEG
  caption_ids: list[str] | None = None  # [Q], as in image.jpg#2
  features: np.ndarray | None = None  # float32 [Q, W], of the text tower

  @property
  def image(self) -> np.ndarray:
    return self.images.vectors


def embed(
  encoder: Encoder, source: pipeline.Source, tables: dict | None = None, progress: bool = False
) -> Pairs:
  """A split, embedded. Records with one image_id are one image, with the captions of all.

  `tables` are its features, where a frozen tower's were computed before (training/features.py).
  """
  captions, columns = source.captions(), source.columns("image_id")
  _, first, image_of_record = np.unique(
    np.asarray(columns["image_id"]), return_index=True, return_inverse=True
  )
  record_of_text = np.repeat(np.arange(len(source)), [len(c) for c in captions])
  flat = [caption for record in captions for caption in record]
  tables = tables or {}
  features = tables.get("text")
  if features is None:
    features = encoder.text_features(flat, progress)
  caption_ids = None
  if "file" in source.features:
    ids = source.columns("caption_ids")["caption_ids"]
    caption_ids = [name.decode() for record in ids for name in record]
  every = images(encoder, source, tables, progress)
  return Pairs(
    text=encoder.project_text(features),
    images=Images(
      vectors=every.vectors[first],
      captions=_merged(captions, image_of_record, len(first)),
      scenes=None if every.scenes is None else every.scenes[first],
      names=None if every.names is None else [every.names[m] for m in first],
    ),
    image_of_text=image_of_record[record_of_text].astype(np.int64),
    captions=flat,
    encoded=lambda m: source.image(first[m]),
    caption_ids=caption_ids,
    features=np.asarray(features),
  )


def images(encoder, source, tables: dict, progress: bool = False) -> Images:
  """Every image of a split, in order, from its features if there are any."""
  if "image" in tables:
    vectors = encoder.project_images(tables["image"])
  else:
    vectors = encoder.embed_source(source, progress)
  scenes = names = None
  if "scene" in source.features:
    scenes = np.stack(source.columns("scene")["scene"]).astype(np.int8)
  if "file" in source.features:
    names = [name.decode() for name in source.columns("file")["file"]]
  return Images(vectors, source.captions(), scenes, names)


def _merged(captions, image_of_record, count):
  """Captions of each record -> of each image, which may have several records."""
  out = [[] for _ in range(count)]
  for image, record in zip(image_of_record, captions, strict=True):
    out[image] += record
  return out
