"""A data set embedded by a model: what evaluation starts from."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from xe_retrieval.data import pipeline
from xe_retrieval.model import Encoder
from xe_retrieval.training import processes


@dataclasses.dataclass(frozen=True)
class Images:
  """A gallery, or distractors beside it, with what is known of each image."""

  vectors: np.ndarray  # float32 [M, D], unit norm
  captions: Sequence[list[str]] | None = None  # [M]
  scenes: np.ndarray | None = None  # int8 [M, 3, 4], of drawn scenes
  names: Sequence[str] | None = None  # [M], file names, where the data set has them


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
  encoder: Encoder, source: pipeline.Source, tables: dict | None = None, scratch=None
) -> Pairs:
  """A split, embedded by all processes. Records with one image_id are one image, all its captions.

  `tables` are its features, where a frozen tower's were computed before (training/features.py);
  under `scratch` are numbered shards of what an interrupted run has embedded.
  """
  captions = source.captions()
  _, first, image_of_record = np.unique(
    source.column("image_id"), return_index=True, return_inverse=True
  )
  record_of_text = np.repeat(np.arange(len(source)), captions.counts)
  flat = list(captions.flat)
  tables = tables or {}
  features = tables.get("text")
  if features is None:
    spans = encoder.spans(len(flat))
    compute = functools.partial(encoder.stream_text_features, flat)
    features = _shared(spans, compute, scratch, "captions")
  caption_ids = None
  if "file" in source.features:
    caption_ids = list(source.column("caption_ids").flat.as_text())
  every = images(encoder, source, tables, scratch)
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


def images(encoder, source, tables: dict, scratch=None) -> Images:
  """Every image of a split, in order, from its features if there are any."""
  if "image" in tables:
    vectors = encoder.project_images(tables["image"])
  else:
    spans = encoder.spans(len(source))
    compute = functools.partial(encoder.stream_images, source)
    vectors = _shared(spans, compute, scratch, "images")
  scenes = names = None
  if "scene" in source.features:
    scenes = source.column("scene").astype(np.int8)
  if "file" in source.features:
    names = source.column("file").as_text()
  return Images(vectors, source.captions(), scenes, names)


def _shared(spans, compute, scratch, name):
  shards = processes.shared_rows(spans, compute, scratch and scratch / name, name)
  return processes.assemble(spans, shards)


def _merged(captions, image_of_record, count):
  """Captions of each record -> of each image, which may have several records."""
  out = [[] for _ in range(count)]
  for image, record in zip(image_of_record, captions, strict=True):
    out[image] += record
  return out
