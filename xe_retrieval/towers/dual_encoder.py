"""Both towers and their projections into the common space."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from xe_retrieval.data import decoding, tokenization
from xe_retrieval.towers import families
from xe_retrieval.towers.families import side_by_side
from xe_retrieval.towers.families.side_by_side import Ids, SideBySide, Square, Standard
from xe_retrieval.towers.resnet import PATCH, ResNet
from xe_retrieval.towers.transformer import Transformer


class TextEncoder(nn.Module):
  """Tokens int32 [B, T] -> tower -> projection."""

  tower: ResNet | Transformer | SideBySide
  embedding_dim: int
  trunk: int = 0  # see Head
  dropout: float = 0.0  # of the features

  def setup(self):
    self.projection = Head(self.embedding_dim, self.trunk, self.dropout)
    if isinstance(self.tower, SideBySide):
      self.standard = Standard()

  def __call__(self, x, train=False):  # -> float32 [B, D]
    return self.project(self.features(x, train), train)

  def project(self, features, train=False):  # float32 [B, width] -> float32 [B, D]
    if isinstance(self.tower, SideBySide):
      features = self.standard(features)
    return self.projection(features, train)

  def features(self, x, train=False):  # -> float32 [B, width]
    """The input of the projection; constant while the tower is frozen, so it can be cached."""
    return side_by_side.pooled(self.tower(x, train=train))

  def tokens(self, x):  # -> float32 [B, T, width]
    """The last layer of the tower at every token or place of the image; see `unpooled`."""
    x = self.tower(x).astype(jnp.float32)
    return x.reshape(len(x), -1, x.shape[-1])  # of a feature map, places row by row


class ImageEncoder(TextEncoder):
  """The same of uint8 pixels [B, H, W, 3], which are normalised first."""

  mean: tuple[float, ...] = (0.0, 0.0, 0.0)  # per channel, pixels in 0..1
  std: tuple[float, ...] = (1.0, 1.0, 1.0)

  def features(self, x, train=False):  # -> float32 [B, width]
    return super().features(self._normalised(x), train)

  def tokens(self, x):  # -> float32 [B, places, width]
    return super().tokens(self._normalised(x))

  def _normalised(self, x):
    return (x.astype(jnp.float32) / 255 - jnp.array(self.mean)) / jnp.array(self.std)


class Head(nn.Module):
  """The projection without bias; before it, if `trunk` > 0, one residual layer of that width."""

  embedding_dim: int
  trunk: int = 0
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x, train=False):  # float32 [B, width] -> float32 [B, D]
    if train and self.dropout:
      x = _dropout(self.make_rng("dropout"), x, self.dropout)
    if self.trunk:
      y = nn.gelu(nn.Dense(self.trunk, name="trunk_in")(nn.LayerNorm(name="trunk_norm")(x)))
      x = x + nn.Dense(x.shape[-1], kernel_init=nn.initializers.zeros, name="trunk_out")(y)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.embedding_dim))
    return x @ kernel


def _dropout(rng, x, rate):  # [B, width] -> [B, width]
  """As nn.Dropout, with a random byte for each value instead of 32 bits.

  With frozen towers, drawing them was half of a training step on a CPU. The rate is rounded to
  1/256, and what is kept is scaled by the rounded one.
  """
  keep = max(round(256 * (1 - rate)), 1)
  words = jax.random.bits(rng, (len(x), -(-x.shape[1] // 4)), jnp.uint32)
  bytes_ = jax.lax.bitcast_convert_type(words, jnp.uint8)  # [B, width / 4, 4]
  kept = bytes_.reshape(len(x), -1)[:, : x.shape[1]].astype(jnp.int32) < keep
  return jnp.where(kept, x * (256 / keep), 0)


class DualEncoder(nn.Module):
  """A text and an image encoder; embeddings are not normalised, the loss and the index do that.

  Each side takes its input (tokens, image) or features that its tower computed from it earlier.
  """

  text: TextEncoder
  image: ImageEncoder

  def __call__(
    self, tokens=None, image=None, text_features=None, image_features=None, train=False
  ):  # -> float32 [B, D], float32 [B, D]
    if text_features is None:
      text_features = self.text_features(tokens, train)
    if image_features is None:
      image_features = self.image_features(image, train)
    return self.project_text(text_features, train), self.project_image(image_features, train)

  def embed_text(self, tokens, train=False):  # int32 [B, T] -> float32 [B, D]
    return self.text(tokens, train)

  def embed_image(self, image, train=False):  # uint8 [B, H, W, 3] -> float32 [B, D]
    return self.image(image, train)

  def project_text(self, features, train=False):  # float32 [B, text width] -> float32 [B, D]
    return self.text.project(features, train)

  def project_image(self, features, train=False):  # float32 [B, image width] -> float32 [B, D]
    return self.image.project(features, train)

  def text_features(self, tokens, train=False):  # int32 [B, T] -> float32 [B, text width]
    return self.text.features(tokens, train)

  def image_features(self, image, train=False):  # uint8 [B, H, W, 3] -> float32 [B, image width]
    return self.image.features(image, train)

  def text_tokens(self, tokens):  # int32 [B, T] -> float32 [B, T, text width]
    return self.text.tokens(tokens)

  def image_tokens(self, image):  # uint8 [B, H, W, 3] -> float32 [B, places, image width]
    return self.image.tokens(image)


def from_config(config):
  """The model of a config whose architecture fields are filled in (see pretrained.configure)."""

  def make(kind, encoder, **more):
    for alone, _ in side_by_side.each(config, encoder):
      _check(alone, encoder)
    tower = _side_by_side if side_by_side.several(config, encoder) else _tower
    head = config[encoder].get("trunk", 0), config[encoder].get("feature_dropout", 0.0)
    return kind(tower(config, encoder), config.embedding_dim, *head, **more)

  pixels = {}
  if not side_by_side.several(config, "image"):  # else each has its own
    pixels = {"mean": tuple(config.image.mean), "std": tuple(config.image.std)}
  return DualEncoder(make(TextEncoder, "text"), make(ImageEncoder, "image", **pixels))


def unpooled(model: DualEncoder) -> DualEncoder:
  """The same model and weights for `text_tokens` and `image_tokens`; it has no features."""

  def of(encoder):
    pools = isinstance(encoder.tower, Transformer)
    return encoder.clone(tower=encoder.tower.clone(pooled=False)) if pools else encoder

  return model.clone(text=of(model.text), image=of(model.image))


def feature_widths(config) -> dict[str, int]:
  """How many features each tower gives to its projection: {"text": …, "image": …}."""
  model = from_config(config)
  return {name: getattr(model, name).tower.feature_width() for name in ("text", "image")}


def _tower(config, encoder):
  """The tower of config.text or config.image, frozen as its field `freeze` says."""
  dtype = jnp.dtype(_one_of(config, "dtype", "float32", "bfloat16"))
  tower = families.of(config, encoder).tower(config[encoder], 0, dtype, config.remat)
  return tower.clone(frozen=_frozen_parts(config, encoder, tower.parts()))


def _side_by_side(config, encoder):
  """The towers of config.text.towers or config.image.towers, all of them frozen."""
  if (freeze := config[encoder].freeze) != "all":
    raise ValueError(
      f"config.{encoder}.freeze={freeze!r}: several towers side by side can only be 'all'"
    )
  alone = [one for one, _ in side_by_side.each(config, encoder)]
  if encoder == "text":
    inputs = [Ids(*span) for span in tokenization.spans(config.text)]
  else:
    spans = decoding.View.of(config.image).spans
    pixels = [(tuple(one.image.mean), tuple(one.image.std)) for one in alone]
    inputs = [Square(*span, *own) for span, own in zip(spans, pixels, strict=True)]
  return SideBySide(tuple(_tower(one, encoder) for one in alone), tuple(inputs))


def _check(config, encoder):
  """ValueError for a field that no tower can have; of those that its family reads."""
  image, family = config.image, families.of(config, encoder).name
  if family != "resnet":
    width, heads = config[encoder].width, config[encoder].heads
    if width % heads:
      raise ValueError(f"config.{encoder}.width={width} is not divisible by heads={heads}")
  if encoder == "text":
    if family not in ("clip", "siglip"):  # which pool in their own way
      _one_of(config.text, "pooling", "cls", "mean", of="text.")
    return
  if family != "resnet":
    if image.get("pooling", ""):
      _one_of(image, "pooling", "cls", "mean", "cls_mean", "attention", of="image.")
    if any(not 1 <= layer <= image.blocks for layer in image.get("layers", ())):
      raise ValueError(
        f"config.image.layers={tuple(image.layers)}: expected numbers from 1 to {image.blocks}"
      )
    return
  _one_of(image, "block", "bottleneck", "basic", of="image.")
  _one_of(image, "stem", "imagenet", "patch", of="image.")
  _one_of(image, "batch_norm", "sync", "frozen", of="image.")
  if image.stem == "patch" and image.size % PATCH:
    raise ValueError(
      f"config.image.size={image.size} is not divisible into patches of {PATCH} pixels, which "
      "config.image.stem='patch' takes"
    )


def init(config, model):
  """Parameters and BatchNorm statistics drawn from config.seed."""
  tokens = jnp.zeros([1, tokenization.spans(config.text)[-1][1]], jnp.int32)
  image = jnp.zeros([1, *decoding.View.of(config.image).shape], jnp.uint8)
  return jax.jit(model.init)(jax.random.PRNGKey(config.seed), tokens, image)


def frozen(params, config):
  """A tree like params: True where config.text.freeze or config.image.freeze applies."""
  model = from_config(config)
  fixed = {
    encoder: set(tower.parts()[: tower.frozen])
    for encoder, tower in (("text", model.text.tower), ("image", model.image.tower))
  }

  def is_frozen(path, _):
    encoder, group, *rest = (key.key for key in path)
    return group == "tower" and rest[0] in fixed[encoder]

  return jax.tree_util.tree_map_with_path(is_frozen, params)


def _frozen_parts(config, encoder, parts):
  """How many parts of a tower are frozen: 'none', 'all', or '2' for its input and 2 blocks."""
  freeze = str(config[encoder].freeze)
  blocks = len([part for part in parts if part != "output"]) - 1
  if freeze == "none":
    return 0
  if freeze == "all":
    return len(parts)
  if freeze.isdecimal() and int(freeze) <= blocks:
    return int(freeze) + 1
  raise ValueError(
    f"config.{encoder}.freeze={freeze!r}: expected 'none', 'all' or a number of blocks 0..{blocks}"
  )


def _one_of(config, field, *allowed, of=""):
  if config[field] not in allowed:
    raise ValueError(f"config.{of}{field}={config[field]!r}: expected one of {', '.join(allowed)}")
  return config[field]
