"""A trained model, restored, and the embeddings that it gives."""

import collections
import functools
import hashlib
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from tqdm import tqdm

from xe_retrieval import settings
from xe_retrieval.data import pipeline, shapes, text
from xe_retrieval.retrieval.pairs import Pairs
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import checkpoints, mesh, step

BATCH = 256


class Encoder:
  """Both towers with their weights: captions and pictures in, unit vectors out."""

  def __init__(self, config, model, variables, tokenizer, devices=None, batch=BATCH):
    self.config, self.tokenizer, self.step = config, tokenizer, None
    self.variables = variables
    self._mesh = mesh.make(devices)
    self._batch = math.ceil(batch / self._mesh.size) * self._mesh.size
    rows, everywhere = mesh.rows(self._mesh), mesh.everywhere(self._mesh)
    several = jax.process_count() > 1  # then all have the same input, and want all vectors
    out = everywhere if several else rows
    compiled = functools.partial(jax.jit, in_shardings=(everywhere, rows), out_shardings=out)
    spread = lambda x: jax.make_array_from_callback(x.shape, rows, lambda part: x[part])  # noqa: E731
    self._put = spread if several else lambda x: x
    self._text = compiled(lambda v, x: _unit(model.apply(v, x, method="embed_text")))
    self._image = compiled(lambda v, x: _unit(model.apply(v, x, method="embed_image")))

  def embed_text(self, captions: list[str], progress: bool = False) -> np.ndarray:
    """[n] -> float32 [n, D], unit norm."""
    tokens = (self.tokenizer(captions[rows]) for rows in self._spans(len(captions)))
    return self._all(self._text, tokens, len(captions), "captions" if progress else None)

  def embed_text_features(self, features: np.ndarray) -> np.ndarray:
    """What the text tower made of n captions [n, width] -> float32 [n, D]."""
    return self._all(self._text, (features[r] for r in self._spans(len(features))), len(features))

  def embed_image_features(self, features: np.ndarray) -> np.ndarray:
    """What the image tower made of n pictures [n, width] -> float32 [n, D]."""
    return self._all(self._image, (features[r] for r in self._spans(len(features))), len(features))

  def embed_pictures(self, batches, count: int, progress: bool = False) -> np.ndarray:
    """Batches of uint8 [≤ batch, size, size, 3], `count` pictures in all -> float32 [count, D]."""
    return self._all(self._image, batches, count, "images" if progress else None)

  def embed_source(self, source: pipeline.Source, progress: bool = False) -> np.ndarray:
    """Every picture of a split, in order -> float32 [M, D]."""
    batches = pipeline.image_batches(source, self.config.image.size, self._batch)
    return self.embed_pictures(batches, len(source), progress)

  def fingerprint(self) -> str:
    """A hash of the weights and of what captions and pictures go through before these."""
    size = self.config.image.size
    digest = hashlib.sha256(f"{self.tokenizer.fingerprint()} {size}".encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(self.variables):
      digest.update(jax.tree_util.keystr(path).encode())
      digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()

  def _spans(self, count):
    return (slice(i, i + self._batch) for i in range(0, count, self._batch))

  def _all(self, function, batches, count, name=None):
    out, done = np.zeros((count, self.config.embedding_dim), np.float32), 0
    pending = collections.deque()  # one batch is computed while the next is made ready
    with tqdm(total=count, unit=f" {name}", disable=not name, file=sys.stdout, delay=2) as bar:

      def collect():
        vectors, rows = pending.popleft()
        out[done : done + rows] = vectors[:rows]
        bar.update(rows)
        return done + rows

      for batch in batches:
        padding = [(0, self._batch - len(batch))] + [(0, 0)] * (batch.ndim - 1)
        pending.append((function(self.variables, self._put(np.pad(batch, padding))), len(batch)))
        if len(pending) > 1:
          done = collect()
      while pending:
        done = collect()
    return out[:done]


def restore(workdir, which: str = "best") -> Encoder:
  """The model of a workdir at its best (on validation) or latest checkpoint."""
  workdir = epath.Path(workdir)
  if not (workdir / "config.json").exists():
    raise ValueError(f"{workdir} is no workdir of a training run: it has no config.json")
  config = settings.from_json((workdir / "config.json").read_text())
  saved = checkpoints.Checkpoints(workdir, read_only=True)
  at = saved.latest() if which == "latest" else saved.best()
  if at is None:
    raise ValueError(f"{workdir} holds no finished checkpoint yet")
  model = dual_encoder.from_config(config)
  like = jax.eval_shape(lambda: step.init_variables(config, model))
  everywhere = mesh.everywhere(mesh.make())
  variables = saved.restore_model(
    at,
    {
      name: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), like.get(name, {})
      )
      for name in ("params", "batch_stats")
    },
  )
  saved.close()
  out = Encoder(config, model, variables, text.load(workdir / "tokenizer", config.text.tokens))
  out.step = at
  return out


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
  if "text" in tables:
    text_vectors = encoder.embed_text_features(tables["text"])
  else:
    text_vectors = encoder.embed_text(flat, progress)
  image_vectors = images(encoder, source, tables, progress)
  relevant = None
  if "scene" in source.features:
    scenes = np.stack(source.columns("scene")["scene"])[first].astype(np.int8)
    relevant = lambda queries: shapes.relevance([flat[q] for q in queries], scenes)  # noqa: E731
  image_names = caption_ids = None
  if "file" in source.features:
    names = source.columns("file", "caption_ids")
    image_names = [names["file"][m].decode() for m in first]
    caption_ids = [name.decode() for record in names["caption_ids"] for name in record]
  return Pairs(
    text=text_vectors,
    image=image_vectors[first],
    image_of_text=image_of_record[record_of_text].astype(np.int64),
    captions=flat,
    picture=lambda m: source.picture(first[m]),
    relevant=relevant,
    image_names=image_names,
    caption_ids=caption_ids,
  )


def images(encoder, source, tables: dict, progress: bool = False) -> np.ndarray:
  """Every picture of a split, in order, from its features if there are any -> float32 [M, D]."""
  if "image" in tables:
    return encoder.embed_image_features(tables["image"])
  return encoder.embed_source(source, progress)


def _unit(x):  # [B, D] -> [B, D]
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
