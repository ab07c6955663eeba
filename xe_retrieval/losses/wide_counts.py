"""Exact numbers without 64-bit integers: counts beyond 32 bits, floats as integers in their order.

JAX has no 64-bit integers unless the whole program enables them, and N² pairs overflow int32 from
N = 46,341 on. A count is therefore int32 [2], limbs (high, low), worth high·2¹⁰ + low: enough for a
million rows. Counts may be added and subtracted limb by limb; `carry` makes them comparable.
"""

import fractions

import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives

BITS = 10
MASK = (1 << BITS) - 1
COLUMNS = 1 << 20  # so many low limbs add up to less than 2³⁰


def count(x, axis=None):  # int32 [..., N], not negative -> [2]
  """The sum of x over all devices; the sum over each column must fit 32 bits."""
  if x.shape[-1] > COLUMNS:
    raise ValueError(f"pairs of {x.shape[-1]:,} rows cannot be counted, only of {COLUMNS:,}")
  x = jnp.sum(x.reshape(-1, x.shape[-1]), axis=0)
  here = carry(jnp.stack([jnp.sum(x >> BITS), jnp.sum(x & MASK)]))
  # Carried before they are added over devices: 2³⁰ of each would overflow from 2 devices on.
  return carry(collectives.total(here, axis))


def carry(x):  # [2] -> [2] with 0 ≤ low < 2¹⁰
  return jnp.stack([x[0] + (x[1] >> BITS), x[1] & MASK])


def at_least(a, b):  # [2], [2] -> bool []
  return carry(a - b)[0] >= 0


def share(x, keep):  # [2] -> [2]
  """⌈keep × x⌉ by long division."""
  p, q = _fraction(keep)
  high, low = x
  rest = (high % q << BITS) + low
  return carry(jnp.stack([high // q * p, rest // q * p + -(-(rest % q * p) // q)]))


def share_of_int(x, keep):  # int32 [...] -> int32 [...]
  """⌈keep × x⌉ for a count that fits 32 bits; the product with p alone might not."""
  p, q = _fraction(keep)
  return x // q * p + -(-(x % q * p) // q)


def _fraction(keep):
  """keep as a fraction p/q, q ≤ 10,000: exact in integers where keep × N² in float32 is not."""
  fraction = max(fractions.Fraction(keep).limit_denominator(10_000), fractions.Fraction(1, 10_000))
  return fraction.numerator, fraction.denominator


def to_float(x):  # [2] -> [] float32, rounded
  return x[0].astype(jnp.float32) * (1 << BITS) + x[1]


def to_int(score):
  """float32 -> int32 of the same order."""
  bits = lax.bitcast_convert_type(score, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def to_score(i):
  """int32 -> float32, the inverse; subnormals become zero, as hardware flushes them to zero."""
  score = lax.bitcast_convert_type(jnp.where(i < 0, i ^ 0x7FFFFFFF, i), jnp.float32)
  return jnp.where(jnp.abs(score) < jnp.finfo(jnp.float32).tiny, 0, score)


def between(low, high, step, part=0.5):
  """An integer in (low, high]: `part` of the way by value, every fourth step half-way by integers.

  The first is fast where scores are spread evenly, the second bounds the steps where they are not.
  """
  by_int = (low | high) - ((low ^ high) >> 1)  # ⌈(low + high) / 2⌉ without overflow
  by_value = to_int((1 - part) * to_score(low) + part * to_score(high))
  return jnp.where(step % 4 == 3, by_int, jnp.clip(by_value, jnp.minimum(low + 1, high), high))


def width(low, high):  # int32, int32 -> uint32
  return high.astype(jnp.uint32) - low.astype(jnp.uint32)
