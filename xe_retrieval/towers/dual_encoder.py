"""Both towers and their projections into the common space."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from xe_retrieval.towers.bert import Bert
from xe_retrieval.towers.resnet import PATCH, ResNet


class TextEncoder(nn.Module):
  """Tokens -> BERT -> CLS vector (or mean over tokens) -> projection."""

  tower: Bert
  embedding_dim: int
  pooling: str = "cls"  # or "mean", over the tokens that are not padding
  trunk: int = 0  # see Head
  dropout: float = 0.0  # of the features

  def setup(self):
    self.projection = Head(self.embedding_dim, self.trunk, self.dropout)

  def __call__(self, tokens, train=False):  # int32 [B, T] -> float32 [B, D]
    return self.project(self.features(tokens, train), train)

  def project(self, features, train=False):  # float32 [B, width] -> float32 [B, D]
    return self.projection(features, train)

  def features(self, tokens, train=False):  # int32 [B, T] -> float32 [B, width]
    """The input of the projection; constant while the tower is frozen, so it can be cached."""
    cls = self.pooling == "cls"
    x = self.tower(tokens, train=train, first_only=cls).astype(jnp.float32)
    if cls:
      return x[:, 0]
    mask = (tokens != 0).astype(jnp.float32)[..., None]
    return (x * mask).sum(1) / jnp.maximum(mask.sum(1), 1)


class ImageEncoder(nn.Module):
  """uint8 pixels -> normalised -> ResNet -> mean over positions -> projection."""

  tower: ResNet
  embedding_dim: int
  mean: tuple[float, ...]  # per channel, pixels in 0..1
  std: tuple[float, ...]
  trunk: int = 0  # see Head
  dropout: float = 0.0  # of the features

  def setup(self):
    self.projection = Head(self.embedding_dim, self.trunk, self.dropout)

  def __call__(self, image, train=False):  # uint8 [B, H, W, 3] -> float32 [B, D]
    return self.project(self.features(image, train), train)

  def project(self, features, train=False):  # float32 [B, width] -> float32 [B, D]
    return self.projection(features, train)

  def features(self, image, train=False):  # uint8 [B, H, W, 3] -> float32 [B, width]
    """The input of the projection; constant while the tower is frozen, so it can be cached."""
    x = (image.astype(jnp.float32) / 255 - jnp.array(self.mean)) / jnp.array(self.std)
    return self.tower(x, train=train).astype(jnp.float32).mean((1, 2))


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


def from_config(config):
  """The model of a config whose architecture fields are filled in (see pretrained.configure)."""
  text, image = config.text, config.image
  dtype = jnp.dtype(_one_of(config, "dtype", "float32", "bfloat16"))
  if text.width % text.heads:
    raise ValueError(f"config.text.width={text.width} is not divisible by heads={text.heads}")
  if image.stem == "patch" and image.size % PATCH:
    raise ValueError(
      f"config.image.size={image.size} is not divisible into patches of {PATCH} pixels, which "
      "config.image.stem='patch' takes"
    )
  bert = Bert(
    vocab_size=text.vocab_size,
    layers=text.layers,
    width=text.width,
    heads=text.heads,
    mlp=text.mlp,
    positions=text.get("positions", text.tokens),
    token_types=text.get("token_types", 2),
    dropout=text.dropout,
    norm_eps=text.get("norm_eps", 1e-12),
    frozen=_frozen_parts(config, "text", text.layers),
    dtype=dtype,
    remat=config.remat,
  )
  resnet = ResNet(
    depths=tuple(image.depths),
    widths=tuple(image.widths),
    block=_one_of(image, "block", "bottleneck", "basic", of="image."),
    stem=_one_of(image, "stem", "imagenet", "patch", of="image."),
    stem_width=image.stem_width,
    downsample_in_bottleneck=image.downsample_in_bottleneck,
    batch_norm=_one_of(image, "batch_norm", "sync", "frozen", of="image."),
    frozen=_frozen_parts(config, "image", sum(image.depths)),
    dtype=dtype,
    remat=config.remat,
  )
  return DualEncoder(
    text=TextEncoder(
      bert,
      config.embedding_dim,
      _one_of(text, "pooling", "cls", "mean", of="text."),
      text.get("trunk", 0),
      text.get("feature_dropout", 0.0),
    ),
    image=ImageEncoder(
      resnet,
      config.embedding_dim,
      tuple(image.mean),
      tuple(image.std),
      image.get("trunk", 0),
      image.get("feature_dropout", 0.0),
    ),
  )


def init(config, model):
  """Parameters and BatchNorm statistics drawn from config.seed."""
  tokens = jnp.zeros([1, config.text.tokens], jnp.int32)
  image = jnp.zeros([1, config.image.size, config.image.size, 3], jnp.uint8)
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


def _frozen_parts(config, encoder, blocks):
  """How many parts of a tower are frozen: 'none', 'all', or '2' for its input and 2 blocks."""
  freeze = str(config[encoder].freeze)
  if freeze == "none":
    return 0
  if freeze == "all":
    return blocks + 1
  if freeze.isdecimal() and int(freeze) <= blocks:
    return int(freeze) + 1
  raise ValueError(
    f"config.{encoder}.freeze={freeze!r}: expected 'none', 'all' or a number of blocks 0..{blocks}"
  )


def _one_of(config, field, *allowed, of=""):
  if config[field] not in allowed:
    raise ValueError(f"config.{of}{field}={config[field]!r}: expected one of {', '.join(allowed)}")
  return config[field]
