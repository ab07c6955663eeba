"""Losses on candidate lists: scores of each caption's own image and of a few more.

Column 0 of scores [B, K] is the caption's own image s_b; `negative` [B, K] says which of the other
columns are wrong images. As plain sums over the whole batch: a compiler that shards the rows adds
the collectives.

  query   mean_b log(1 + Σ_k exp(s_bk − s_b))     the negatives of the same caption
  batch   mean_b log(1 + Σ_ck exp(s_ck − s_b))    those of all captions: the paper's cross-example
                                                  scope, so that scores are comparable
  binary  mean −log σ(±s_bk)                      each pair by itself is a match or not
"""

import jax
import jax.numpy as jnp

SCOPES = {
  "sampled_softmax": "query",
  "cross_example_softmax": "batch",
  "binary_cross_entropy": "binary",
}


def get(name: str):
  """loss(scores float32 [B, K], negative bool [B, K]) -> []."""
  if name not in SCOPES:
    raise ValueError(f"loss {name!r} is unknown for candidates; it is one of: {', '.join(SCOPES)}")
  return binary if SCOPES[name] == "binary" else lambda *pairs: softmax(*pairs, SCOPES[name])


def softmax(scores, negative, scope):  # [B, K], bool [B, K], "query" | "batch" -> []
  axis = {"query": 1, "batch": (0, 1)}[scope]
  high = jnp.max(jax.lax.stop_gradient(scores), axis, where=negative, initial=-jnp.inf)
  high = jnp.where(jnp.isneginf(high), 0, high)  # no negative at all
  shifted = jnp.where(negative, scores - high[..., None], -jnp.inf)
  z = jnp.sum(jnp.exp(shifted), axis)  # [B] or []
  log_z = high + jnp.log(jnp.where(z == 0, 1, z))
  positive = scores[:, 0]
  return jnp.mean(jnp.where(z == 0, 0 * positive, jax.nn.softplus(log_z - positive)))


def binary(scores, negative):  # [B, K], bool [B, K] -> []
  pull = jax.nn.softplus(-scores[:, 0])
  push = jnp.sum(jax.nn.softplus(scores), axis=1, where=negative)
  return jnp.sum(pull + push) / (len(scores) + jnp.sum(negative))
