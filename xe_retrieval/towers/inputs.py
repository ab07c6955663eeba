"""Tokens or pixels -> the vectors that enter a Transformer, and which of them attend to which.

Both give x [B, T, width], a mask of keys (bool, broadcastable to [B, heads, T, T], or None) and a
bias of the attention scores (float [heads, T, T], or None).
"""

import functools
import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from xe_retrieval.towers.transformer import INIT

FARTHEST = 128  # tokens; MPNet's relative positions beyond share a bucket


class Tokens(nn.Module):
  """Sum of word, position and token-type embeddings, perhaps normalised."""

  vocab_size: int
  positions: int
  width: int
  token_types: int = 0  # rows of a table of which the first is used; 0: no table
  norm: bool = True
  pad: int = 0  # id of padding, which no token attends to; -1: it is like any other
  after_pad: bool = False  # positions count from pad + 1, as in RoBERTa
  causal: bool = False
  buckets: int = 0  # relative positions, of which each head learns a bias; MPNet: 32
  heads: int = 0  # with buckets
  dropout: float = 0.0
  norm_eps: float = 1e-12
  dtype: jnp.dtype = jnp.float32

  prefix = 0

  @property
  def room(self):
    """How many tokens a text may have."""
    return self.positions - (self.pad + 1 if self.after_pad else 0)

  @nn.compact
  def __call__(self, tokens, train):  # int32 [B, T]
    if tokens.shape[1] > self.room:
      raise ValueError(f"{tokens.shape[1]} tokens per text, but only {self.room} positions")

    def table(rows, name, width=self.width):
      return nn.Embed(rows, width, embedding_init=INIT, dtype=self.dtype, name=name)

    count = tokens.shape[1]
    known = tokens != self.pad
    x = table(self.vocab_size, "word")(tokens)  # [B, T, width]
    if self.token_types:
      x += table(self.token_types, "token_type")(jnp.zeros([1, count], jnp.int32))
    at = jnp.cumsum(known, axis=1) * known + self.pad if self.after_pad else jnp.arange(count)
    x += table(self.positions, "position")(at)
    if self.norm:
      x = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="norm")(x)
    x = nn.Dropout(self.dropout)(x, deterministic=not train)

    mask = known[:, None, None] if self.pad >= 0 else None
    if self.causal:
      mask = np.tril(np.ones((1, 1, count, count), bool))
    bias = None
    if self.buckets:
      near = buckets(np.arange(count) - np.arange(count)[:, None], self.buckets)
      bias = table(self.buckets, "relative", self.heads)(near).transpose(2, 0, 1)
    return x, mask, bias


def buckets(offset, count):  # int [..] -> int [..] below count
  """T5's relative positions: exact when near, then logarithmic up to FARTHEST."""
  half = count // 2
  exact, far = half // 2, np.abs(offset)
  scale = math.log(FARTHEST / exact)
  log = exact + np.log(np.maximum(far, 1).astype(np.float32) / exact) / scale * (half - exact)
  near = np.where(far < exact, far, np.minimum(log.astype(np.int32), half - 1))
  return (offset > 0) * half + near


class Patches(nn.Module):
  """Square patches, each a linear function of its pixels, with learned positions."""

  patch: int  # pixels
  grid: int  # positions per side that are learned; interpolated for images of another size
  width: int
  cls: bool = True  # a learned first token
  registers: int = 0  # learned tokens without a position after it
  bias: bool = True
  norm: bool = False  # CLIP's, before the first layer
  dropout: float = 0.0
  norm_eps: float = 1e-12
  dtype: jnp.dtype = jnp.float32

  @property
  def prefix(self):
    return self.cls + self.registers

  @nn.compact
  def __call__(self, pixels, train):  # [B, H, W, 3], normalised
    b, side, p = pixels.shape[0], pixels.shape[1] // self.patch, self.patch
    x = pixels[:, : side * p, : side * p].astype(self.dtype)  # as a convolution leaves out the rest
    x = x.reshape(b, side, p, side, p, 3).swapaxes(2, 3).reshape(b, side**2, p * p * 3)
    x = Projection(p, self.width, self.bias, self.dtype, name="patch")(x)  # [B, side², width]

    position = Position(self.grid**2 + self.cls, self.width, name="position")()
    first, position = jnp.split(position, [int(self.cls)])
    if side != self.grid:
      resize = _cubic(self.grid, side)  # [side, grid]
      position = position.reshape(self.grid, self.grid, -1)
      position = jnp.einsum("yi,xj,ijd->yxd", resize, resize, position).reshape(side**2, -1)
    x += position.astype(self.dtype)
    if self.cls:
      cls = self.param("cls", INIT, (self.width,)) + first[0]
      x = jnp.concatenate([_repeat(cls[None], b, self.dtype), x], axis=1)
    if self.registers:
      tokens = self.param("registers", INIT, (self.registers, self.width))
      x = jnp.concatenate([x[:, :1], _repeat(tokens, b, self.dtype), x[:, 1:]], axis=1)
    if self.norm:
      x = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="norm")(x)
    return nn.Dropout(self.dropout)(x, deterministic=not train), None, None


class Projection(nn.Module):
  """A convolution over patches that do not overlap: one matrix product."""

  patch: int
  width: int
  bias: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):  # [B, T, patch² · 3] -> [B, T, width]
    shape = (self.patch, self.patch, 3, self.width)
    kernel = self.param("kernel", nn.initializers.lecun_normal((0, 1, 2), 3), shape)
    x = x @ kernel.reshape(-1, self.width).astype(self.dtype)
    if not self.bias:
      return x
    return x + self.param("bias", nn.initializers.zeros, (self.width,)).astype(self.dtype)


class Position(nn.Module):
  rows: int
  width: int

  @nn.compact
  def __call__(self):  # -> float32 [rows, width]
    return self.param("embedding", INIT, (self.rows, self.width))


def _repeat(tokens, count, dtype):  # [n, width] -> [count, n, width]
  return jnp.broadcast_to(tokens.astype(dtype), (count, *tokens.shape))


@functools.cache
def _cubic(old, new):
  """float32 [new, old]: bicubic interpolation as torch.nn.functional.interpolate does it.

  Without antialiasing; jax.image.resize has another kernel (a = −0.5) and other borders.
  """
  a = -0.75
  at = (np.arange(new) + 0.5) * old / new - 0.5
  low = np.floor(at).astype(int)
  out = np.zeros((new, old))
  for tap in range(-1, 3):
    t = np.abs(at - low - tap)
    near = ((a + 2) * t - (a + 3)) * t**2 + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    np.add.at(out, (np.arange(new), np.clip(low + tap, 0, old - 1)), np.where(t <= 1, near, far))
  return out.astype(np.float32)
