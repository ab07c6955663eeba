"""Training captions and images kept with a model: against them it knows what is usual.

level        how a query scores against images in general: mean and standard deviation of its scores
             against the bank's images
familiarity  how near a query is to captions the model was trained on: the mean cosine of its
             text-tower features to the ten nearest of the bank's, after taking off their mean.
             Nonsense, other languages and far-off subjects lie below nearly all real captions

`Scoring` corrects cosines by it: s'(x, y) = s(x, y) − α·a(x) − β·b(y) + γ·min(0, k(x) − q)

a(x), b(y)   (1/scale)·log mean exp(scale·s) of a caption against the bank's images and of an image
             against its captions: a makes queries comparable, b takes down images that are near to
             everything
k(x), q      a query's familiarity, and that of which a quarter of the bank's captions fall short

bank.npz holds the bank and the fingerprint of the model that made it.
"""

import dataclasses
import functools
import io
import re
import zipfile

import numpy as np

from xe_retrieval.data import decoding, paths

NAME = "bank.npz"
SIZE = 4096  # captions, and images
NEAREST = 10
RARE = 0.25  # share of captions whose familiarity counts against them
_HALVED = ("features", "texts", "images")  # stored as float16
AT_ONCE = 2048  # queries whose cosines to the whole bank are held in memory
_WORD = re.compile(r"\w{3}")


@dataclasses.dataclass(frozen=True)
class Bank:
  model: str  # fingerprint
  captions: list[str]  # [C]
  centre: np.ndarray  # float32 [W]: mean of the captions' features
  features: np.ndarray  # float32 [C, W], centred, unit norm
  texts: np.ndarray  # float32 [C, D], unit norm
  images: np.ndarray  # float32 [I, D], unit norm
  usual: float  # familiarity that all but RARE of the captions reach, among those of other images
  spread: np.ndarray | None = None  # float32 [W]: of several text towers, what features are over

  @functools.cached_property
  def _mean(self):
    return self.images.mean(axis=0, dtype=np.float64)  # [D]

  @functools.cached_property
  def _second(self):
    images = self.images.astype(np.float64)
    return images.T @ images / len(images)  # [D, D]: a query costs D² and not I·D

  def level(self, text):
    """Unit vectors float32 [Q, ≥ D] -> mean and standard deviation of cosines, float64 [Q]."""
    text = text[:, : self.images.shape[1]]
    mean = text.astype(np.float64) @ self._mean
    second = np.einsum("qd,de,qe->q", text, self._second, text, dtype=np.float64, optimize=True)
    return mean, np.sqrt(np.maximum(second - mean**2, 0))

  def familiarity(self, features):
    """Text-tower features [Q, W] -> float64 [Q]."""
    return self._near(features)[1].mean(axis=1)

  def nearest(self, features, count=3) -> list[list[str]]:
    """Text-tower features [Q, W] -> the captions most like each query, without repetitions.

    Those without any word, as "m m mm m" among COCO's, come last of the NEAREST.
    """
    rows, _ = self._near(features)
    found = [dict.fromkeys(self.captions[i] for i in row) for row in rows]
    return [sorted(captions, key=lambda c: not _WORD.search(c))[:count] for captions in found]

  def _near(self, features):
    """[Q, W] -> int [Q, k] rows, float [Q, k] cosines of the nearest captions, best first."""
    if len(features) > AT_ONCE:
      parts = [self._near(features[i : i + AT_ONCE]) for i in range(0, len(features), AT_ONCE)]
      return tuple(np.concatenate(part) for part in zip(*parts, strict=True))
    cosines = _centred(features, self.centre, self.spread) @ self.features.T
    k = min(NEAREST, cosines.shape[1])
    rows = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    values = np.take_along_axis(cosines, rows, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(values, order, axis=1)

  def write(self, path) -> None:
    """Whole or not at all; halves of the bits are enough for features."""
    file = io.BytesIO()
    np.savez(
      file,
      model=np.array(self.model),
      captions=np.frombuffer("\0".join(self.captions).encode(), np.uint8),
      centre=self.centre,
      usual=self.usual,
      **({} if self.spread is None else {"spread": self.spread}),
      **{name: getattr(self, name).astype(np.float16) for name in _HALVED},
    )
    paths.write(path, file.getvalue())


class Scoring:
  """Unit vectors -> vectors whose dot product is the score in use.

  With a correction, they have two more dimensions: [x, 1, −α·a(x) + γ·…] and [y, −β·b(y), 1].
  """

  def __init__(self, config, bank: Bank | None):
    self.correction = correction(config)
    self.dim, self.bank = config.embedding_dim, bank

  @property
  def width(self) -> int:
    return self.dim + 2 * bool(self.correction)

  def text(self, vectors, features):
    """float32 [Q, D], text-tower features [Q, W] -> float32 [Q, width]."""
    if not self.correction:
      return vectors
    bank, c = self._known(), self.correction
    offset = np.zeros(len(vectors))
    if c["query"]:
      offset -= c["query"] * _log_mean_exp(vectors, bank.images, c["scale"])
    if c["familiarity"]:
      offset += c["familiarity"] * np.minimum(0, bank.familiarity(features) - bank.usual)
    return _joined(vectors, np.ones(len(vectors)), offset)

  def image(self, vectors):
    """float32 [M, D] -> float32 [M, width]."""
    if not self.correction:
      return vectors
    bank, c = self._known(), self.correction
    offset = np.zeros(len(vectors))
    if c["image"]:
      offset -= c["image"] * _log_mean_exp(vectors, bank.texts, c["scale"])
    return _joined(vectors, offset, np.ones(len(vectors)))

  def plain(self, vectors):
    """Those of `image` or `text` -> such that the product with any of `image` is the cosine."""
    out = np.array(vectors)
    out[:, self.dim :] = 0
    return out

  def _known(self):
    if self.bank is None:
      raise ValueError(
        "scores of this model are corrected by a bank of training captions and images, which is "
        "not there yet; python -m xe_retrieval.evaluate --workdir=… makes it"
      )
    return self.bank


def correction(config) -> dict | None:
  """α, β, γ and the scale of config.bank; None where all are 0: scores are plain cosines."""
  fields = config.get("bank", {})
  out = {name: float(fields.get(name, 0)) for name in ("query", "image", "familiarity")}
  if not any(out.values()):
    return None
  return out | {"scale": float(fields.get("scale", 0) or config.scale)}


def in_words(correction: dict | None) -> str:
  """What scores are: "cosine − 0.5·a(caption) − 0.5·b(image), …"."""
  if not correction:
    return "cosine"
  terms = [("query", "a(caption)"), ("image", "b(image)")]
  words = "".join(f" − {correction[key]:g}·{term}" for key, term in terms if correction[key])
  rare = " and less for captions of an unusual kind" * bool(correction["familiarity"])
  return f"cosine{words}, corrected by a bank of training captions and images" + rare


def make(encoder, source, tables=None, size: int = SIZE) -> Bank:
  """From the training split: `size` captions and images, the same in every run.

  `tables` are cached features of the split, where there are any (training/features.py).
  """
  tables = tables or {}
  captions = source.captions()
  record = np.repeat(np.arange(len(captions)), captions.counts)
  captions = captions.flat
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
    images = encoder.embed_squares(
      _squares(source, shown, decoding.View.of(encoder.config.image)), len(shown)
    )
  centre = features.mean(axis=0)
  # Features of several towers have scales of their own: none should outweigh the others.
  standard = encoder.variables.get("batch_stats", {}).get("text", {}).get("standard", {})
  spread = np.asarray(standard["std"]) if standard else None
  centred = _centred(features, centre, spread)
  bank = Bank(
    encoder.fingerprint(),
    texts,
    centre,
    centred,
    encoder.project_text(features),
    images,
    _usual(centred, record[chosen]),
    spread,
  )
  # As it is read back, so that what is fitted now is used later.
  half = {n: getattr(bank, n).astype(np.float16).astype(np.float32) for n in _HALVED}
  return dataclasses.replace(bank, **half)


def read(directory, fingerprint: str) -> Bank | None:
  """That of a workdir, index or exported directory, if there is one of this very model."""
  path = paths.given(directory) / NAME
  if not path.exists():
    return None
  try:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as saved:
      if str(saved["model"]) != fingerprint:
        return None
      return Bank(
        str(saved["model"]),
        saved["captions"].tobytes().decode().split("\0"),
        saved["centre"],
        **{name: saved[name].astype(np.float32) for name in _HALVED},
        usual=float(saved["usual"]),
        spread=saved.get("spread"),
      )
  except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
    raise ValueError(f"{path} is damaged ({e}); evaluate writes it anew") from e


def _squares(source, rows, view, batch=64):
  for start in range(0, len(rows), batch):
    encoded = [source.image(int(row)) for row in rows[start : start + batch]]
    yield np.stack([decoding.square(data, view=view) for data in encoded])


def _usual(features, record):
  """Centred features [C, W], their records [C] -> the familiarity that all but RARE reach."""
  found = []
  for start in range(0, len(features), AT_ONCE):
    part = slice(start, start + AT_ONCE)
    cosines = np.where(record[part, None] == record, -1, features[part] @ features.T)
    k = min(NEAREST, cosines.shape[1])
    found.append(-np.partition(-cosines, k - 1, axis=1)[:, :k].mean(axis=1))
  return float(np.quantile(np.concatenate(found), RARE))


def _log_mean_exp(vectors, bank, scale):
  """[n, D], [B, D] -> float64 [n]: (1/scale)·log mean exp(scale·cosine)."""
  out = np.empty(len(vectors))
  for start in range(0, len(vectors), AT_ONCE):
    part = slice(start, start + AT_ONCE)
    scores = vectors[part] @ bank.T
    high = scores.max(axis=1)
    mean = np.exp(scale * (scores - high[:, None])).mean(axis=1, dtype=np.float64)
    out[part] = high + np.log(mean) / scale
  return out


def _joined(vectors, *columns):
  columns = [np.asarray(column, np.float32)[:, None] for column in columns]
  return np.concatenate([vectors, *columns], axis=1)


def _centred(features, centre, spread):
  """[n, W] -> [n, W] of unit norm."""
  return _unit((features - centre) / (1 if spread is None else spread))


def _unit(x):
  return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
