"""Scores of pairs: unit vectors, positives and their margins, the mask of negatives, strips."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

STRIP = 256  # rows of the score matrix that exist at a time,
ENTRIES = 1 << 26  # unless a strip would exceed this many scores: 64 rows of a million columns
GROUP = 32  # strips have a multiple of this many rows


class Live(NamedTuple):
  """Scalars of a loss that may be learned or change from step to step."""

  scale: jax.Array  # logits are scale × cosine
  bias: jax.Array  # added to the logits by sigmoid
  softening: jax.Array  # weight of the plain cosine beside the margin of L-Softmax and A-Softmax


def normalize(x):  # [N, D] any float -> [N, D] float32
  """Unit rows; a zero row stays zero and has a zero gradient."""
  x = x.astype(jnp.float32)
  # x / |x| does not depend on the scale of x, so dividing by a constant changes neither value nor
  # gradient; it keeps the squares of tiny and huge rows in range.
  largest = lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
  x = x / jnp.where(largest == 0, 1, largest)
  squared = jnp.sum(x * x, axis=-1, keepdims=True)
  return x / jnp.sqrt(jnp.where(squared == 0, 1, squared))


def positives(text, image, margin=None, softening=0.0):  # [N, D], [N, D] -> cosines [N]
  """The cosine of each pair, lowered by the margin that it has to overcome.

  L-Softmax (Liu et al. 2016) and A-Softmax (Liu et al. 2017) replace cos θ by
  ψ(θ) = (−1)^q cos(mθ) − 2q for θ in [qπ/m, (q+1)π/m], which falls m times as fast. There they
  differ in whether weights are normalised. Here all vectors are, so they differ in m: L-Softmax has
  2, A-Softmax 4. Both are trained on (λ·cos θ + ψ(θ)) / (1 + λ), λ = softening, which their authors
  lower during training. ψ is a piecewise polynomial of c = cos θ: no arccos, whose gradient is
  infinite at c = 1.
  """
  c = jnp.sum(text * image, axis=-1)
  if margin is None:
    return c
  return (softening * c + MARGINS[margin](c)) / (1 + softening)


def _l_softmax(c):  # ψ for m = 2
  return 2 * c * jnp.abs(c) - 1


def _a_softmax(c):  # ψ for m = 4
  cos4 = 8 * c**4 - 8 * c**2 + 1
  half = jnp.float32(0.5**0.5)
  q = (c < half).astype(jnp.float32) + (c < 0) + (c < -half)
  return jnp.where((q == 1) | (q == 3), -1, 1) * cos4 - 2 * q


MARGINS = {"l_softmax": _l_softmax, "a_softmax": _a_softmax}


def negatives(rows, columns, real=None):  # tuples of ids [R], [C], bool [R] -> bool [R, C]
  """Pairs that share no id. A row shares its ids with itself, so the diagonal is never negative."""
  negative = True
  for row, column in zip(rows, columns, strict=True):
    negative = negative & (row[:, None] != column[None, :])
  return negative if real is None else negative & real[:, None]


def scores(x, y, rows, columns, real=None):  # [R, D], [C, D], ids, ids, bool [R] -> [R, C]
  """x @ y.T where the pair is a negative, −inf elsewhere.

  The barrier stops XLA from fusing the product into its consumers and computing it once for each.
  """
  product = lax.optimization_barrier(matmul(x, y.T))
  return jnp.where(negatives(rows, columns, real), product, -jnp.inf)


def matmul(x, y):
  """Product in full float32; by default TPUs multiply in bfloat16."""
  return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def strips(tree, columns):  # leaves [n, ...] -> [strips, R, ...]
  """Cuts rows into equal strips of R rows, R a multiple of GROUP, padding the last.

  Returns (tree, real): real is bool [strips, R], false for padding, or None if there is none.
  """
  n = len(jax.tree.leaves(tree)[0])
  count = -(-n // max(min(STRIP, ENTRIES // columns), GROUP))
  rows = -(-n // (count * GROUP)) * GROUP
  missing = count * rows - n

  def cut(x):
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, rows, *x.shape[1:])

  return jax.tree.map(cut, tree), cut(jnp.ones(n, bool)) if missing else None
