"""A trained model: captions and images in, unit vectors out.

model = load("runs/ce")                          # a workdir, what `export` wrote, or a CLIP
model.embed_text(["two dogs on a beach"])        # float32 [1, D], unit norm
model.embed_images(["a.jpg", array, pil_image])  # float32 [3, D], unit norm
model.score(["two dogs on a beach"], ["a.jpg"])  # float32 [1, 1]: cosines, or corrected by a bank
"""

import collections
import concurrent.futures
import functools
import hashlib
import math
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from xe_retrieval import config as config_lib
from xe_retrieval.data import decoding, mesh, paths, pipeline, tokenization
from xe_retrieval.preparation import cores
from xe_retrieval.towers import bank as banks
from xe_retrieval.towers import dual_encoder, export_format, pretrained, weight_files
from xe_retrieval.training import checkpoint_reader

BATCH = 256


def load(path, which: str = "best", revision: str = "") -> "Model":
  """The model of a workdir (its best or latest checkpoint), of an exported directory, or a CLIP.

  A Hugging Face CLIP or SigLIP is taken as it is: a directory, or an id (owner/name). An id may
  also be that of a model pushed by `export --push`; `revision` is a commit, tag or branch there.
  """
  name, path = str(path), paths.given(path)
  on_hub = not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name)
  if revision and not on_hub:
    raise ValueError(f"revision={revision!r} is of a model on the Hub; {path} is on this machine")
  if on_hub and (copy := weight_files.locate_exported(name, revision)):
    path = paths.given(copy)
  if export_format.is_exported(path):
    encoder = read_exported(path)
  elif pretrained.is_dual(path) or on_hub:
    if revision:
      name = weight_files.locate(name, revision)
    encoder = stock(pretrained.stock_config(name))
  else:
    encoder = restore(path, which)
  model = Model(encoder)
  if model.scoring.correction:
    model.scoring.bank = banks.read(path, model.fingerprint())
  return model


def restore(workdir, which: str = "best") -> "Encoder":
  """The encoder of a workdir at its best (on validation) or latest checkpoint."""
  workdir = paths.given(workdir)
  if not (workdir / "config.json").exists():
    raise ValueError(f"{workdir} is no workdir of a training run: it has no config.json")
  config = config_lib.from_json((workdir / "config.json").read_text())
  if config.get("steps") == 0:  # written by `evaluate --pretrained`
    return stock(config)
  model = dual_encoder.from_config(config)
  like = jax.eval_shape(lambda: dual_encoder.init(config, model))
  step, variables, learned = checkpoint_reader.read_model(
    workdir, which, like, mesh.replicated(mesh.make())
  )
  variables = mesh.local(variables, mesh.make(jax.local_devices()))
  tokenizer = tokenization.load(workdir / "tokenizer", config.text)
  return Encoder(config, model, variables, tokenizer, step=step, learned=learned)


def stock(config) -> "Encoder":
  """The encoder of a Hugging Face CLIP or SigLIP, see pretrained.stock_config."""
  return Encoder(config, *pretrained.stock(config), step=0)


def read_exported(path) -> "Encoder":
  """The encoder of an exported directory."""
  config, model, variables, tokenizer = export_format.read(path)
  return Encoder(config, model, variables, tokenizer)


class Encoder:
  """Both towers with their weights over this process's devices, compiled for one batch size."""

  def __init__(
    self, config, model, variables, tokenizer, devices=None, batch=BATCH, step=None, learned=None
  ):
    self.config, self.tokenizer, self.step = config, tokenizer, step
    self.learned = learned or {}  # by the loss; not part of the model, but of an exported CLIP
    self.model, self.variables = model, variables
    self.text_width = dual_encoder.feature_widths(config)["text"]
    self.mesh = mesh.make(devices or jax.local_devices())
    self._batch = math.ceil(batch / self.mesh.size) * self.mesh.size
    self._rows, everywhere = mesh.rows(self.mesh), mesh.replicated(self.mesh)
    compiled = functools.partial(
      jax.jit, in_shardings=(everywhere, self._rows), out_shardings=self._rows
    )

    def unit(method):
      return compiled(lambda v, x: _unit(model.apply(v, x, method=method)))

    self._image = unit("embed_image")
    self._text_features = compiled(lambda v, x: model.apply(v, x, method="text_features"))
    self._project_text, self._project_image = unit("project_text"), unit("project_image")

  def embed_text(self, captions: list[str], progress: bool = False) -> np.ndarray:
    """[n] -> float32 [n, D], unit norm."""
    return self.project_text(self.text_features(captions, progress))

  def text_features(self, captions: list[str], progress: bool = False) -> np.ndarray:
    """What the text tower makes of captions, before the projection: [n] -> float32 [n, width]."""
    tokens = (self.tokenizer(captions[rows]) for rows in self.spans(len(captions)))
    name, width = "captions" if progress else None, self.text_width
    return self._all(self._text_features, tokens, len(captions), name, width)

  def project_text(self, features: np.ndarray) -> np.ndarray:
    """Text features [n, width] -> float32 [n, D], unit norm."""
    return self._all(self._project_text, self._batches(features), len(features))

  def project_images(self, features: np.ndarray) -> np.ndarray:
    """Image features [n, width] -> float32 [n, D], unit norm."""
    return self._all(self._project_image, self._batches(features), len(features))

  def embed_squares(self, batches, count: int, progress: bool = False) -> np.ndarray:
    """Batches of uint8 [≤ batch, size, size, 3], `count` images in all -> float32 [count, D]."""
    return self._all(self._image, batches, count, "images" if progress else None)

  def stream_squares(self, batches):
    """Yields float32 [n, D] for each batch of uint8 [n ≤ batch, size, size, 3]; unit norm."""
    return self._stream(self._image, batches)

  def embed_source(self, source: pipeline.Source) -> np.ndarray:
    """Every image of a split, in order -> float32 [M, D]."""
    return np.concatenate(list(self.stream_images(source, self.spans(len(source)))))

  def stream_images(self, source: pipeline.Source, spans: list[slice]):
    """Yields float32 [n, D] for each span of records, at most a batch; unit norm."""
    view = decoding.View.of(self.config.image)
    return self._stream(self._image, pipeline.image_batches(source, view, spans))

  def stream_text_features(self, captions, spans: list[slice]):
    """Yields float32 [n, width] for each span of captions."""
    return self._stream(self._text_features, (self.tokenizer(captions[span]) for span in spans))

  def fingerprint(self) -> str:
    """A hash of the weights, of how inputs are preprocessed and how scores are corrected."""
    about = f"{self.tokenizer.fingerprint()} {self.config.image.size}"
    view = decoding.View.of(self.config.image)
    about += "" if view.resize == "crop" else f" {view}"
    if correction := banks.correction(self.config):
      about += f" {correction} {self.config.bank.size}"
    digest = hashlib.sha256(about.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(self.variables):
      digest.update(jax.tree_util.keystr(path).encode())
      digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()

  def spans(self, count: int) -> list[slice]:
    """All rows, a batch in each."""
    return pipeline.spans(count, self._batch)

  def _batches(self, rows):
    return (rows[span] for span in self.spans(len(rows)))

  def _all(self, function, batches, count, name=None, width=None):
    out, done = np.zeros((count, width or self.config.embedding_dim), np.float32), 0
    with tqdm(total=count, unit=f" {name}", disable=not name, file=sys.stdout, delay=2) as bar:
      for rows in self._stream(function, batches):
        out[done : done + len(rows)] = rows
        done += len(rows)
        bar.update(len(rows))
    return out[:done]

  def _stream(self, function, batches):
    """Yields the rows of each batch, computed while the next one is made ready."""
    pending = collections.deque()
    for batch in batches:
      padding = [(0, self._batch - len(batch))] + [(0, 0)] * (batch.ndim - 1)
      # Put there by hand: where there are several processes, jit does not divide NumPy's arrays.
      padded = jax.device_put(np.pad(batch, padding), self._rows)
      pending.append((function(self.variables, padded), len(batch)))
      if len(pending) > 1:
        vectors, rows = pending.popleft()
        yield np.asarray(vectors)[:rows]
    for vectors, rows in pending:
      yield np.asarray(vectors)[:rows]


class Model:
  """An encoder for any number of inputs: compiled for powers of two up to BATCH."""

  def __init__(self, encoder: Encoder):
    self.config, self.step = encoder.config, encoder.step
    self.tokenizer, self.variables = encoder.tokenizer, encoder.variables
    self.fingerprint = functools.cache(encoder.fingerprint)  # () -> str
    self.scoring = banks.Scoring(encoder.config, None)
    self._encoders = functools.cache(self._encoder)

  def embed_text(self, captions, progress=None) -> np.ndarray:
    """Strings [n] -> float32 [n, D], unit norm; a progress bar if it takes long."""
    captions = _sequence(captions, "captions")
    for i, caption in enumerate(captions):
      if not isinstance(caption, str):
        raise TypeError(f"captions[{i}] is {type(caption).__name__}; expected a string")
    return self.embed_queries(captions, _progress(progress, captions))[0]

  def embed_queries(self, captions: list[str], progress=False) -> tuple[np.ndarray, np.ndarray]:
    """[n] -> float32 [n, D] unit vectors, float32 [n, width] features of the text tower."""
    vectors, features = [], []
    for encoder, part in self._split(len(captions)):
      features.append(encoder.text_features(captions[part], progress))
      vectors.append(encoder.project_text(features[-1]))
    return self._joined(vectors), self._joined(
      features, dual_encoder.feature_widths(self.config)["text"]
    )

  def embed_images(self, images, progress=None) -> np.ndarray:
    """Files, uint8 arrays [H, W, 3] or PIL images [n] -> float32 [n, D], unit norm.

    Cropped to the square in the middle and resized, as in evaluation.
    """
    images = _sequence(images, "images")
    parts = [
      encoder.embed_squares(
        self._squares(images, part), part.stop - part.start, _progress(progress, images)
      )
      for encoder, part in self._split(len(images))
    ]
    return self._joined(parts)

  def score(self, captions, images) -> np.ndarray:
    """Strings [n], images [m] as in embed_images -> float32 [n, m]: what search ranks by.

    Cosines; with a bank (config.bank), corrected by it.
    """
    vectors, features = self.embed_queries(_sequence(captions, "captions"))
    shown = self.scoring.image(self.embed_images(images))
    return self.scoring.text(vectors, features) @ shown.T

  def embed_squares(self, batches, count) -> np.ndarray:
    """Batches of at most BATCH `decoding.square`s, `count` at most in all -> float32 [n, D]."""
    batch = min(BATCH, 1 << max(count - 1, 0).bit_length())
    return self._encoders(batch).embed_squares(batches, count)

  def stream_squares(self, batches, batch=BATCH):
    """Batches of at most `batch` squares -> yields float32 [n, D] of each; see Encoder._stream."""
    return self._encoders(batch).stream_squares(batches)

  def _squares(self, images, part):
    """Batches of uint8 [≤ BATCH, size, size, 3], decoded by a thread per core."""
    cut = functools.partial(decoding.square, view=decoding.View.of(self.config.image))
    with concurrent.futures.ThreadPoolExecutor(cores.available()) as pool:
      for start in range(part.start, part.stop, BATCH):
        rows = range(start, min(start + BATCH, part.stop))
        yield np.stack(list(pool.map(cut, (images[i] for i in rows), rows)))

  def _split(self, count):
    """Whole batches, then the rest in the smallest power of two that holds it."""
    whole = count // BATCH * BATCH
    if whole:
      yield self._encoders(BATCH), slice(0, whole)
    if count > whole:
      bucket = 1 << (count - whole - 1).bit_length()
      yield self._encoders(bucket), slice(whole, count)

  def _encoder(self, batch):
    model = dual_encoder.from_config(self.config)
    return Encoder(self.config, model, self.variables, self.tokenizer, batch=batch)

  def _joined(self, parts, width=None):
    none = np.zeros((0, width or self.config.embedding_dim), np.float32)
    return np.concatenate([none, *parts])


def _sequence(items, name):
  if isinstance(items, str | os.PathLike | np.ndarray) or hasattr(items, "convert"):  # PIL
    raise TypeError(f"{name} should be a list; for a single one, pass [{name[:-1]}]")
  return list(items)


def _progress(progress, items):
  return len(items) > BATCH if progress is None else progress


def _unit(x):  # [B, D] -> [B, D]
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
