"""Training captions and images kept with a model: against them it knows a query's level and kind.

level        how a query scores against images in general: mean and standard deviation of its scores
             against the bank's images
familiarity  how near a query is to captions the model was trained on: the mean cosine of its
             text-tower features to the ten nearest of the bank's, after taking off their mean.
             Nonsense, other languages and far-off subjects lie below nearly all real captions

bank.npz holds both and the fingerprint of the model that made them.
"""

import dataclasses
import functools
import pathlib
import zipfile

import numpy as np

from xe_retrieval.data import decoding

NAME = "bank.npz"
SIZE = 4096  # captions, and images
NEAREST = 10
AT_ONCE = 2048  # queries whose cosines to all captions are held in memory


@dataclasses.dataclass(frozen=True)
class Bank:
  model: str  # fingerprint
  captions: list[str]  # [C]
  centre: np.ndarray  # float32 [W]: mean of the captions' features
  features: np.ndarray  # float32 [C, W], centred, unit norm
  images: np.ndarray  # float32 [I, D], unit norm

  @functools.cached_property
  def _mean(self):
    return self.images.mean(axis=0, dtype=np.float64)  # [D]

  @functools.cached_property
  def _second(self):
    images = self.images.astype(np.float64)
    return images.T @ images / len(images)  # [D, D]: a query costs D² and not I·D

  def level(self, text):
    """Unit vectors float32 [Q, D] -> mean and standard deviation of their scores, float64 [Q]."""
    mean = text.astype(np.float64) @ self._mean
    second = np.einsum("qd,de,qe->q", text, self._second, text, dtype=np.float64, optimize=True)
    return mean, np.sqrt(np.maximum(second - mean**2, 0))

  def familiarity(self, features):
    """Text-tower features [Q, W] -> float64 [Q]."""
    return self._near(features)[1].mean(axis=1)

  def nearest(self, features, count=3) -> list[list[str]]:
    """Text-tower features [Q, W] -> the captions most like each query, without repetitions."""
    rows, _ = self._near(features)
    found = [list(dict.fromkeys(self.captions[i] for i in row)) for row in rows]
    return [captions[:count] for captions in found]

  def _near(self, features):
    """[Q, W] -> int [Q, k] rows, float [Q, k] cosines of the nearest captions, best first."""
    if len(features) > AT_ONCE:
      parts = [self._near(features[i : i + AT_ONCE]) for i in range(0, len(features), AT_ONCE)]
      return tuple(np.concatenate(part) for part in zip(*parts, strict=True))
    cosines = _unit(features - self.centre) @ self.features.T
    k = min(NEAREST, cosines.shape[1])
    rows = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    values = np.take_along_axis(cosines, rows, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(values, order, axis=1)

  def write(self, path) -> None:
    """Whole or not at all; halves of the bits are enough for features."""
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
      np.savez(
        file,
        model=np.array(self.model),
        captions=np.frombuffer("\0".join(self.captions).encode(), np.uint8),
        centre=self.centre,
        features=self.features.astype(np.float16),
        images=self.images.astype(np.float16),
      )
    part.replace(path)


def make(encoder, source, tables=None, size: int = SIZE) -> Bank:
  """From the training split: `size` captions and images, the same in every run.

  `tables` are cached features of the split, where there are any (training/features.py).
  """
  tables = tables or {}
  captions = [caption for record in source.captions() for caption in record]
  random = np.random.default_rng(0)
  chosen = np.sort(random.permutation(len(captions))[:size])
  shown = np.sort(random.permutation(len(source))[:size])
  texts = [captions[i] for i in chosen]
  if "text" in tables:
    features = np.asarray(tables["text"][chosen])
  else:
    features = encoder.text_features(texts)
  if "image" in tables:
    images = encoder.project_images(np.asarray(tables["image"][shown]))
  else:
    images = encoder.embed_squares(_squares(source, shown, encoder.config.image.size), len(shown))
  centre = features.mean(axis=0)
  bank = Bank(
    encoder.fingerprint(),
    texts,
    centre,
    _unit(features - centre),
    images,
  )
  return _rounded(bank)


def read(directory, fingerprint: str) -> Bank | None:
  """That of a workdir, index or exported directory, if there is one of this very model."""
  path = pathlib.Path(directory).expanduser() / NAME
  if not path.is_file():
    return None
  try:
    with np.load(path, allow_pickle=False) as saved:
      if str(saved["model"]) != fingerprint:
        return None
      return Bank(
        str(saved["model"]),
        saved["captions"].tobytes().decode().split("\0"),
        saved["centre"],
        saved["features"].astype(np.float32),
        saved["images"].astype(np.float32),
      )
  except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
    raise ValueError(f"{path} is damaged ({e}); evaluate writes it anew") from e


def _squares(source, rows, size, batch=64):
  for start in range(0, len(rows), batch):
    encoded = [source.image(int(row)) for row in rows[start : start + batch]]
    yield np.stack([decoding.square(data, size=size) for data in encoded])


def _rounded(bank):
  """As it is read back, so that what is fitted now is used later."""
  half = {n: getattr(bank, n).astype(np.float16).astype(np.float32) for n in ("features", "images")}
  return dataclasses.replace(bank, **half)


def _unit(x):
  return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
