"""BERT (Devlin et al. 2018): tokens -> one vector per token, as transformers' BertModel.

Left out: the pooler (a dense layer and tanh on the first token); the paper projects the bare CLS
vector.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

INIT = nn.initializers.normal(0.02)


class Bert(nn.Module):
  """Post-norm transformer; token id 0 is padding."""

  vocab_size: int
  layers: int
  width: int
  heads: int
  mlp: int
  positions: int = 512
  token_types: int = 2
  dropout: float = 0.1
  norm_eps: float = 1e-12
  frozen: int = 0  # how many of `parts()` stay fixed: no gradient, no dropout
  dtype: jnp.dtype = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, tokens, token_types=None, train=False, first_only=False):
    """int32 [B, T] -> [B, T, width], or [B, 1, width], of [CLS] alone, with less work."""
    if tokens.shape[1] > self.positions:
      raise ValueError(f"{tokens.shape[1]} tokens per text, but only {self.positions} positions")
    mask = tokens != 0  # [B, T]
    if token_types is None:
      token_types = jnp.zeros_like(tokens)

    x = Embeddings(
      self.vocab_size,
      self.positions,
      self.token_types,
      self.width,
      self.dropout,
      self.norm_eps,
      self.dtype,
      name="embeddings",
    )(tokens, token_types, train and self.frozen < 1)
    if self.frozen == 1:
      x = jax.lax.stop_gradient(x)

    layer = nn.remat(Layer, static_argnums=(3, 4)) if self.remat else Layer
    for i, name in enumerate(self.parts()[1:], start=2):
      x = layer(self.heads, self.mlp, self.dropout, self.norm_eps, self.dtype, name=name)(
        x, mask, train and self.frozen < i, first_only and i == self.layers + 1
      )
      if self.frozen == i:
        x = jax.lax.stop_gradient(x)
    return x

  def parts(self):
    """Names of the parameter groups from input to output, the unit of freezing."""
    return ["embeddings", *(f"layer_{i}" for i in range(self.layers))]


class Embeddings(nn.Module):
  """Sum of word, position and token-type embeddings, normalised."""

  vocab_size: int
  positions: int
  token_types: int
  width: int
  dropout: float
  norm_eps: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, tokens, token_types, train):
    def table(rows, name):
      return nn.Embed(rows, self.width, embedding_init=INIT, dtype=self.dtype, name=name)

    x = table(self.vocab_size, "word")(tokens)  # [B, T, width]
    x += table(self.token_types, "token_type")(token_types)
    x += table(self.positions, "position")(jnp.arange(tokens.shape[1]))
    x = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="norm")(x)
    return nn.Dropout(self.dropout)(x, deterministic=not train)


class Layer(nn.Module):
  """Self-attention, then a two-layer perceptron, each added to its input and normalised."""

  heads: int
  mlp: int
  dropout: float
  norm_eps: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, mask, train, first_only):  # [B, T, width], bool [B, T]
    width = x.shape[-1]

    def dense(features, name):
      return nn.Dense(features, kernel_init=INIT, dtype=self.dtype, name=name)

    def add_and_norm(x, y, name):
      y = nn.Dropout(self.dropout)(y, deterministic=not train)
      return nn.LayerNorm(self.norm_eps, dtype=self.dtype, name=name)(x + y)

    def split(x):  # [B, T, width] -> [B, T, heads, width / heads]
      return x.reshape(*x.shape[:2], self.heads, width // self.heads)

    key = split(dense(width, "key")(x))
    value = split(dense(width, "value")(x))
    x = x[:, :1] if first_only else x  # keys and values from all tokens, the query from [CLS] only
    query = split(dense(width, "query")(x))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores *= (width // self.heads) ** -0.5
    # Not −inf: a text of nothing but padding would yield NaN instead of uniform attention.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    attention = jax.nn.softmax(scores).astype(self.dtype)  # [B, heads, T, T]
    attention = nn.Dropout(self.dropout)(attention, deterministic=not train)
    y = jnp.einsum("bhqk,bkhd->bqhd", attention, value).reshape(x.shape)
    x = add_and_norm(x, dense(width, "attention_out")(y), "attention_norm")

    y = jax.nn.gelu(dense(self.mlp, "mlp_in")(x), approximate=False)  # [B, T, mlp]
    return add_and_norm(x, dense(width, "mlp_out")(y), "mlp_norm")
