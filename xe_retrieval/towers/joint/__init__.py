"""A joint encoder reads a caption and an image together: their tokens -> one logit per pair.

The tokens are those of a dual encoder's towers (dual_encoder.unpooled). Pairs come as lists: row b
of `rows` [B, K] holds the K images, by their row among the N at hand, that caption b is compared
with. What depends on a caption or an image alone is computed once for it, not for every pair.

joint  one stream of a readout token, text tokens and image tokens, as in most small re-rankers
two    a stream of text and one of image tokens, each with a readout, that attend to themselves and
       then to each other (co-attention), as in ViLBERT

The last layer's kernel starts at zero: before training, every logit is 0 and a score that adds
them to the first stage's ranks as the first stage does.
"""

import flax.linen as nn
import jax.numpy as jnp

from xe_retrieval.towers.joint.blocks import (
  Compression,
  CrossAttention,
  Perceptron,
  Projections,
  SelfAttention,
)
from xe_retrieval.towers.transformer import INIT

STREAMS = ("joint", "two")


class JointEncoder(nn.Module):
  """`image_tokens`, of which an index stores the result, then `logits`; calling it does both."""

  streams: str = "joint"
  layers: int = 2
  width: int = 256
  heads: int = 4
  mlp: int = 512
  compressed: int = 16  # tokens that learned queries make of an image; 0: all places are kept
  first_input: bool = False  # the head also sees the first stage's score
  dropout: float = 0.0
  input_dropout: float = 0.0  # of projected tokens
  dtype: jnp.dtype = jnp.float32
  remat: bool = False

  def setup(self):
    attention = dict(heads=self.heads, dropout=self.dropout, dtype=self.dtype)
    self.text_input = Input(self.width, self.input_dropout, False, self.dtype)
    self.image_input = Input(self.width, self.input_dropout, True, self.dtype)
    if self.compressed:
      self.compression = Compression(self.compressed, mlp=self.mlp, **attention)
    layer, static = {"joint": (JointLayer, (4, 5)), "two": (TwoStreamLayer, (3, 4, 5))}[
      self.streams
    ]
    layer = nn.remat(layer, static_argnums=static) if self.remat else layer
    self.layer = [layer(mlp=self.mlp, **attention) for _ in range(self.layers)]
    names = ("pair",) if self.streams == "joint" else ("text", "image")
    self.readout = {name: self.param(f"readout_{name}", INIT, (self.width,)) for name in names}
    self.head = Head(self.width, self.dropout)

  def __call__(self, text, known, image, rows, first, train=False):
    """As `logits`, of the image tokens [N, places, any width] of a tower."""
    return self.logits(text, known, self.image_tokens(image, train), rows, first, train)

  def image_tokens(self, image, train=False):  # [N, places, any width] -> [N, tokens, width]
    x = self.image_input(image, train)
    return self.compression(x, train) if self.compressed else x

  def logits(self, text, known, image, rows, first, train=False):
    """Text tokens [B, T, any width], bool [B, T] (False: padding), `image_tokens` [N, C, width],
    int [B, K] rows of them, the first stage's scores [B, K] -> float32 [B, K].
    """
    text = self.text_input(text, train)
    image = image.astype(self.dtype)
    pairs = Pairs(rows)
    read = self._joint if self.streams == "joint" else self._two
    x = read(text, known, image, pairs, train).astype(jnp.float32)  # [P, width]
    first = first.reshape(-1, 1).astype(jnp.float32) if self.first_input else None
    return self.head(x, first, train).reshape(rows.shape)

  def _joint(self, text, known, image, pairs, train):
    readout = self.readout["pair"].astype(self.dtype)[None]  # [1, width]
    parts = (readout, text, image)
    mask = pairs.join(jnp.ones([1], bool), known, jnp.ones(image.shape[:2], bool))  # [P, n]
    # The first layer's keys, queries and values: once per caption and image.
    projected = [self.layer[0].projections(x) for x in parts]
    projected = tuple(pairs.join(*each) for each in zip(*projected, strict=True))
    x = pairs.join(*parts)  # [P, 1 + T + C, width]
    for i, layer in enumerate(self.layer):
      x = layer(x, projected if i == 0 else None, mask, i == self.layers - 1, train)
    return x[:, 0]

  def _two(self, text, known, image, pairs, train):
    text, image = (
      jnp.concatenate([jnp.broadcast_to(one.astype(self.dtype), (x.shape[0], 1, self.width)), x], 1)
      for one, x in ((self.readout["text"], text), (self.readout["image"], image))
    )
    known = jnp.concatenate([jnp.ones([known.shape[0], 1], bool), known], axis=1)
    # The first layer's self-attention: once per caption and image.
    text, image = self.layer[0].alone(text, image, known, train)
    streams = pairs.texts(text), pairs.images(image)
    mask = pairs.texts(known)
    for i, layer in enumerate(self.layer):
      streams = layer(streams, mask, i > 0, i == self.layers - 1, train)
    return streams[0][:, 0] * streams[1][:, 0]  # as ViLBERT


class Pairs:
  """int [B, K] -> arrays of P = B·K pairs from those of captions [B, …] and images [N, …]."""

  def __init__(self, rows):
    self._rows = rows

  def texts(self, x):  # [B, n, …] -> [P, n, …]
    repeated = jnp.broadcast_to(x[:, None], (*self._rows.shape, *x.shape[1:]))
    return repeated.reshape(-1, *x.shape[1:])

  def images(self, x):  # [N, n, …] -> [P, n, …]
    return x[self._rows.reshape(-1)]

  def join(self, one, text, image):  # [1, …], [B, T, …], [N, C, …] -> [P, 1 + T + C, …]
    one = jnp.broadcast_to(one, (self._rows.size, *one.shape))
    return jnp.concatenate([one, self.texts(text), self.images(image)], axis=1)


class Input(nn.Module):
  """Tokens of a tower -> those of the joint encoder; places of an image learn where they are."""

  width: int
  dropout: float
  positions: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, train):  # [n, T, any width] -> [n, T, width]
    # The projection has a scale and bias; without those, no gradient goes back to wide tokens.
    norm = nn.LayerNorm(dtype=jnp.float32, use_scale=False, use_bias=False, name="norm")
    x = norm(x.astype(jnp.float32)).astype(self.dtype)
    x = nn.Dense(self.width, kernel_init=INIT, dtype=self.dtype, name="projection")(x)
    if self.positions:
      x += self.param("position", INIT, x.shape[1:]).astype(self.dtype)
    return nn.Dropout(self.dropout)(x, deterministic=not train)


class JointLayer(nn.Module):
  """Self-attention over both kinds of tokens, then a perceptron."""

  heads: int
  mlp: int
  dropout: float
  dtype: jnp.dtype

  def setup(self):
    self.projections = Projections(self.heads, self.dtype)
    self.attention = SelfAttention(self.heads, self.dropout, self.dtype)
    self.perceptron = Perceptron(self.mlp, self.dropout, self.dtype)

  def __call__(self, x, projected, mask, last, train):
    """[P, n, d], what `projections` gives of x or None, bool [P, n] -> the same shape as x.

    `last`: only the readout is computed, [P, 1, d].
    """
    projected = self.projections(x, last) if projected is None else projected
    return self.perceptron(self.attention(x, projected, mask, last, train), train)


class TwoStreamLayer(nn.Module):
  """Each stream attends to itself, then to the other; then a perceptron of its own."""

  heads: int
  mlp: int
  dropout: float
  dtype: jnp.dtype

  def setup(self):
    attention = dict(heads=self.heads, dropout=self.dropout, dtype=self.dtype)
    each = ("text", "image")
    self.projections = {name: Projections(self.heads, self.dtype) for name in each}
    self.itself = {name: SelfAttention(**attention) for name in each}
    self.other = {name: CrossAttention(**attention) for name in each}
    self.perceptron = {name: Perceptron(self.mlp, self.dropout, self.dtype) for name in each}

  def alone(self, text, image, known, train):
    """Self-attention: [B, T, d], [N, C, d], bool [B, T] -> the same shapes."""
    streams = zip(("text", "image"), (text, image), (known, None), strict=True)
    return tuple(
      self.itself[name](x, self.projections[name](x), mask, False, train)
      for name, x, mask in streams
    )

  def __call__(self, streams, mask, itself, last, train):
    """([P, T, d], [P, C, d]), bool [P, T] -> the same shapes; `itself`: see `alone`.

    `last`: only the readouts are computed, [P, 1, d] each.
    """
    text, image = self.alone(*streams, mask, train) if itself else streams
    asking = (text[:, :1], image[:, :1]) if last else (text, image)
    text, image = (
      self.other["text"](asking[0], image, None, train),
      self.other["image"](asking[1], text, mask, train),
    )
    return self.perceptron["text"](text, train), self.perceptron["image"](image, train)


class Head(nn.Module):
  """A pair's vector, and perhaps the first stage's score -> its logit, 0 before training."""

  width: int
  dropout: float

  @nn.compact
  def __call__(self, x, first, train):  # float32 [P, d], [P, 1] or None -> float32 [P, 1]
    x = nn.LayerNorm(name="norm")(x)
    x = x if first is None else jnp.concatenate([x, first], axis=1)
    x = nn.gelu(nn.Dense(self.width, kernel_init=nn.initializers.lecun_normal(), name="hidden")(x))
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    return nn.Dense(1, kernel_init=nn.initializers.zeros, name="logit")(x)


def from_config(config) -> JointEncoder:
  """The encoder of config.joint; ValueError for a field that it cannot have."""
  joint = config.joint
  if joint.streams not in STREAMS:
    allowed = ", ".join(STREAMS)
    raise ValueError(f"config.joint.streams={joint.streams!r}: expected one of {allowed}")
  if joint.width % joint.heads:
    raise ValueError(
      f"config.joint.width={joint.width} is not divisible by config.joint.heads={joint.heads}"
    )
  for field, least in (("layers", 1), ("mlp", 1), ("compressed", 0)):
    if joint[field] < least:
      raise ValueError(f"config.joint.{field}={joint[field]} should be at least {least}")
  for field in ("dropout", "input_dropout"):
    if not 0 <= joint[field] < 1:
      raise ValueError(f"config.joint.{field}={joint[field]} should be a share in [0, 1)")
  fields = ("streams", "layers", "width", "heads", "mlp", "compressed", "first_input")
  fields = {name: joint[name] for name in (*fields, "dropout", "input_dropout")}
  return JointEncoder(**fields, dtype=jnp.dtype(config.dtype), remat=config.remat)
