"""Layers of the joint encoder: attention whose inputs may be shared by many pairs.

Every layer normalises its input (pre-norm) and adds what it computes to it. Keys, queries and
values are functions of single tokens, so a layer computes them apart from the attention itself: in
the first layer once per caption and once per image, not once per pair.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from xe_retrieval.towers.transformer import INIT


class SelfAttention(nn.Module):
  """Tokens of one sequence attend to each other."""

  heads: int
  dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, parts, mask, first, train):
    """[P, n, d], `parts` as of Projections, bool [P, n] or None -> [P, n, d].

    With `first`, only the first token attends, and it alone is returned: [P, 1, d].
    """
    query, key, value = parts
    if first:
      x, query = x[:, :1], query[:, :1]
    return _attend(self, x, query, key, value, mask, train)


class Projections(nn.Module):
  """Tokens [..., n, d] -> normalised query, key and value, each [..., n, heads, d / heads].

  With `first`, the query is that of the first token only.
  """

  heads: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, first=False):
    x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
    d = x.shape[-1]

    def dense(features, name, x):
      x = nn.Dense(features, kernel_init=INIT, dtype=self.dtype, name=name)(x)
      return x.reshape(*x.shape[:-1], features // d, self.heads, d // self.heads)

    query = dense(d, "query", x[..., :1, :] if first else x)[..., 0, :, :]
    both = dense(2 * d, "key_value", x)
    return query, both[..., 0, :, :], both[..., 1, :, :]


class CrossAttention(nn.Module):
  """Tokens of one sequence attend to those of another."""

  heads: int
  dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, other, mask, train):
    """[P, n, d], [P, m, d], bool [P, m] of the other tokens or None -> [P, n, d]."""
    d = x.shape[-1]

    def dense(features, name, x):
      x = nn.LayerNorm(dtype=self.dtype, name=f"{name}_norm")(x)
      x = nn.Dense(features, kernel_init=INIT, dtype=self.dtype, name=name)(x)
      return x.reshape(*x.shape[:-1], features // d, self.heads, d // self.heads)

    query, both = dense(d, "query", x)[..., 0, :, :], dense(2 * d, "key_value", other)
    return _attend(self, x, query, both[..., 0, :, :], both[..., 1, :, :], mask, train)


class Perceptron(nn.Module):
  """Two layers on every token."""

  mlp: int
  dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, train):  # [P, n, d] -> [P, n, d]
    y = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
    y = nn.gelu(nn.Dense(self.mlp, kernel_init=INIT, dtype=self.dtype, name="in")(y))
    y = nn.Dense(x.shape[-1], kernel_init=INIT, dtype=self.dtype, name="out")(y)
    return x + nn.Dropout(self.dropout)(y, deterministic=not train)


class Compression(nn.Module):
  """Image tokens -> a few that learned queries read from them, so that they can be stored."""

  count: int
  heads: int
  mlp: int
  dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, train):  # [N, places, d] -> [N, count, d]
    queries = self.param("queries", nn.initializers.normal(1.0), (self.count, x.shape[-1]))
    queries = jnp.broadcast_to(queries.astype(self.dtype), (x.shape[0], *queries.shape))
    attention = CrossAttention(self.heads, self.dropout, self.dtype, name="attention")
    queries = attention(queries, x, None, train)
    return Perceptron(self.mlp, self.dropout, self.dtype, name="mlp")(queries, train)


def _attend(layer, x, query, key, value, mask, train):
  """Attention of [P, n, heads, d/heads] over [P, m, heads, d/heads], added to x [P, n, d].

  Called within the compact method of `layer`.
  """
  scores = jnp.einsum("pqhd,pkhd->phqk", query, key, preferred_element_type=jnp.float32)
  scores *= query.shape[-1] ** -0.5
  if mask is not None:
    # Not −inf: a text of nothing but padding would yield NaN instead of uniform attention.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  attention = jax.nn.softmax(scores).astype(layer.dtype)  # [P, heads, n, m]
  y = jnp.einsum("phqk,pkhd->pqhd", attention, value).reshape(x.shape)
  y = nn.Dense(x.shape[-1], kernel_init=INIT, dtype=layer.dtype, name="out")(y)
  return x + nn.Dropout(layer.dropout)(y, deterministic=not train)
