"""The Transformer of all text towers and of ViT-like image towers, as in PyTorch's transformers.

BERT, MPNet, CLIP, SigLIP, ViT, DINOv2, … differ in fields; families/ says which has which. Left out
are BERT's and ViT's poolers (a dense layer and tanh on the first token).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

INIT = nn.initializers.normal(0.02)
ACTIVATIONS = {  # by the names of config.json
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_new": jax.nn.gelu,  # by tanh
  "gelu_pytorch_tanh": jax.nn.gelu,
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
  "relu": jax.nn.relu,
}


class Transformer(nn.Module):
  """Embeddings, layers, and an output that pools tokens into one vector."""

  embeddings: nn.Module  # inputs.Tokens or inputs.Patches
  layers: int
  width: int
  heads: int
  mlp: int
  pre_norm: bool = False  # normalises the input of attention and perceptron; else their sum with it
  activation: str = "gelu"
  layer_scale: bool = False  # a learned factor per channel before each sum
  final_norm: bool = False
  # cls: the first token. mean: all but padding, of images the patches. cls_mean: both, side by
  # side. eos: the first end of text. last: the last, be it padding. attention: by a learned query.
  pooling: str = "cls"
  eos: int = -1  # id of the end of text; -1: the highest id of a text
  head: int = 0  # width of a dense layer after pooling; 0: none
  chosen: tuple[int, ...] = ()  # layers (1 is the first) whose pooled outputs are joined; (): last
  dropout: float = 0.0
  norm_eps: float = 1e-12
  frozen: int = 0  # how many of `parts()` stay fixed: no gradient, no dropout
  pooled: bool = True  # False: all tokens of the last layer, for a joint encoder
  dtype: jnp.dtype = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, inputs, train=False):
    """int32 [B, T] or float32 [B, H, W, 3] -> float32 [B, feature_width()], or [B, T, width]."""
    x, mask, bias = self.embeddings(inputs, train and self.frozen < 1)
    if self.frozen:  # MPNet's bias goes into every layer
      x, bias = jax.lax.stop_gradient((x, bias))
    query, at = self._token(inputs)
    layer = nn.remat(Layer, static_argnums=(5,)) if self.remat else Layer
    found = []
    for i in range(1, self.layers + 1):
      last = i == self.layers and self.pooled and not self.chosen
      x = layer(
        self.heads,
        self.mlp,
        self.pre_norm,
        self.activation,
        self.layer_scale,
        query if last else None,
        self.dropout,
        self.norm_eps,
        self.dtype,
        name=f"layer_{i - 1}",
      )(x, mask, bias, at if last else None, train and self.frozen <= i)
      x = jax.lax.stop_gradient(x) if self.frozen == i + 1 else x
      if last or i in self.chosen:
        found.append(x)

    output = Output(
      self.pooling if self.pooled else "none",
      self.embeddings.prefix,
      self.final_norm,
      self.head,
      self.heads,
      self.mlp,
      self.activation,
      self.norm_eps,
      self.dtype,
      name="output",
    )
    if not self.pooled:
      return jax.lax.stop_gradient(output(x, mask, None, None).astype(jnp.float32))
    pooled = [output(x, mask, query, at) for x in found]
    x = jnp.concatenate(pooled, axis=-1).astype(jnp.float32)
    return jax.lax.stop_gradient(x) if self.frozen > self.layers + 1 else x

  def parts(self):
    """Names of the parameter groups from input to output, the unit of freezing."""
    last = self.final_norm or self.head or self.pooling == "attention"
    return ["embeddings", *(f"layer_{i}" for i in range(self.layers)), *["output"] * bool(last)]

  def feature_width(self):
    one = self.head or self.width * (1 + (self.pooling == "cls_mean"))
    return one * max(len(self.chosen), 1)

  def _token(self, inputs):
    """The token that pooling takes: its position, or a one-hot [B, T]; None and None: all."""
    if self.pooling != "eos":
      return {"cls": 0, "last": -1}.get(self.pooling), None
    ends = inputs == self.eos if self.eos >= 0 else inputs == inputs.max(1, keepdims=True)
    return None, jax.nn.one_hot(ends.argmax(1), inputs.shape[1], dtype=self.dtype)


class Layer(nn.Module):
  """Self-attention, then a two-layer perceptron, each added to its input."""

  heads: int
  mlp: int
  pre_norm: bool
  activation: str
  layer_scale: bool
  query: int | None  # the only token to compute; keys and values are of all
  dropout: float
  norm_eps: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, mask, bias, at, train):
    """[B, T, width], bool [.., T or 1, T], float [heads, T, T], one-hot [B, T] -> [B, t, width]."""
    width = x.shape[-1]

    def dense(features, name):
      return nn.Dense(features, kernel_init=INIT, dtype=self.dtype, name=name)

    def norm(x, name):
      return nn.LayerNorm(self.norm_eps, dtype=self.dtype, name=name)(x)

    def add(x, y, name):
      if self.layer_scale:
        y *= self.param(f"{name}_scale", nn.initializers.ones, (width,)).astype(y.dtype)
      x = x + nn.Dropout(self.dropout)(y, deterministic=not train)
      return x if self.pre_norm else norm(x, f"{name}_norm")

    def split(x):  # [B, T, width] -> [B, T, heads, width / heads]
      return x.reshape(*x.shape[:2], self.heads, width // self.heads)

    y = norm(x, "attention_norm") if self.pre_norm else x
    key, value = split(dense(width, "key")(y)), split(dense(width, "value")(y))
    one = self.query is not None or at is not None
    x = pick(x, self.query, at)
    query = split(dense(width, "query")(pick(y, self.query, at)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores *= (width // self.heads) ** -0.5
    if bias is not None:
      scores += pick(bias, self.query, at) if one else bias
    if mask is not None:
      if one and mask.shape[2] > 1:
        mask = pick(mask[:, 0].astype(self.dtype), self.query, at)[:, None] > 0
      # Not −inf: a text of nothing but padding would yield NaN instead of uniform attention.
      scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    attention = jax.nn.softmax(scores).astype(self.dtype)  # [B, heads, t, T]
    attention = nn.Dropout(self.dropout)(attention, deterministic=not train)
    y = jnp.einsum("bhqk,bkhd->bqhd", attention, value).reshape(x.shape)
    x = add(x, dense(width, "attention_out")(y), "attention")

    y = norm(x, "mlp_norm") if self.pre_norm else x
    y = ACTIVATIONS[self.activation](dense(self.mlp, "mlp_in")(y))  # [B, t, mlp]
    return add(x, dense(width, "mlp_out")(y), "mlp")


class Output(nn.Module):
  """Tokens -> one vector: normalised, pooled, and perhaps a dense layer."""

  pooling: str
  prefix: int  # tokens of an image that are no patches
  final_norm: bool
  head: int
  heads: int
  mlp: int
  activation: str
  norm_eps: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, mask, query, at):  # [B, t, width] -> [B, width]
    x = pick(x, query, at) if x.shape[1] > 1 else x  # a layer before the last has all tokens
    if self.final_norm:
      x = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="norm")(x)
    if self.pooling == "none":
      return x  # [B, T, width]
    if self.pooling == "attention":
      x = self._attend(x)
    elif self.pooling in ("mean", "cls_mean"):
      parts = [x[:, 0].astype(jnp.float32)] * (self.pooling == "cls_mean")
      x = jnp.concatenate([*parts, self._mean(x, mask)], axis=-1)
    else:
      x = x[:, 0]
    if self.head:
      x = nn.Dense(self.head, kernel_init=INIT, dtype=self.dtype, name="head")(x)
    return x

  def _mean(self, x, mask):
    x = x[:, self.prefix :].astype(jnp.float32)
    if mask is None:
      return x.mean(1)
    weights = mask[:, 0, 0, :, None].astype(jnp.float32)  # [B, T, 1]
    return (x * weights).sum(1) / jnp.maximum(weights.sum(1), 1)

  def _attend(self, x):
    """One learned query attends to all tokens; then a perceptron, added: SigLIP's head."""
    width = x.shape[-1]
    probe = self.param("probe", INIT, (width,)).astype(self.dtype)
    kernel, bias = (
      value.astype(self.dtype)
      for value in Packed(width, name="qkv")()  # one tensor, as in torch.nn.MultiheadAttention
    )
    split = lambda x: x.reshape(*x.shape[:-1], self.heads, width // self.heads)  # noqa: E731
    query = split(probe @ kernel[:, :width] + bias[:width])  # [heads, d]
    key, value = (split(y) for y in jnp.split(x @ kernel[:, width:] + bias[width:], 2, axis=-1))
    scores = jnp.einsum("hd,bkhd->bhk", query, key, preferred_element_type=jnp.float32)
    attention = jax.nn.softmax(scores * (width // self.heads) ** -0.5).astype(self.dtype)
    x = jnp.einsum("bhk,bkhd->bhd", attention, value).reshape(x.shape[0], width)

    def dense(features, name):
      return nn.Dense(features, kernel_init=INIT, dtype=self.dtype, name=name)

    x = dense(width, "attention_out")(x)
    y = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name="mlp_norm")(x)
    y = ACTIVATIONS[self.activation](dense(self.mlp, "mlp_in")(y))
    return x + dense(width, "mlp_out")(y)


class Packed(nn.Module):
  """Kernel and bias of three dense layers in one."""

  width: int

  @nn.compact
  def __call__(self):  # -> [width, 3 width], [3 width]
    kernel = self.param("kernel", INIT, (self.width, 3 * self.width))
    return kernel, self.param("bias", nn.initializers.zeros, (3 * self.width,))


def pick(x, query, at):
  """[n, T, d] -> [n, 1, d]: row `query`, or for each n that of a one-hot [n, T]; or all of x."""
  if query is not None:
    return x[:, query : query + 1 or None]
  if at is None:
    return x
  return jnp.einsum("bt,btd->bd", at, jnp.broadcast_to(x, (at.shape[0], *x.shape[1:])))[:, None]
