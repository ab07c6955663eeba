"""The exact k-th largest score of a matrix that is never held, on any number of devices.

A pass computes the scores strip by strip and cuts each strip into groups, some rows of one column.
Given a bracket [low, high] that should contain the k-th largest, a group reports three numbers: how
many of its scores lie in the bracket, the highest of them and the lowest. This bounds the rank of any
threshold t: of c such scores all are ≥ t if the lowest is, none if the highest is not, and otherwise
between 1 and c − 1. A search over either bound leaves the next, much narrower bracket. The first one
is a guess from a sample, narrow enough for most groups to hold one score or none; then the bounds all
but meet, and the second pass as a rule is exact. When crowded groups keep a bracket wide, the next
pass looks at half of it, so that the number of passes is bounded whatever the scores.

Only counts cross devices. They are pairs of int32, (high, low) limbs, for N² pairs overflow one.
Thresholds are searched as int32 in the order of the floats they stand for and compared as floats.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import pairs

SAMPLE = 128  # scores that each row gives to the first guess
LIMB = 10  # bits of the low limb
FIELD = 10  # bits of a count within a group, two to an int32
PASSES = 100  # more than bisection alone would need


class Mined(NamedTuple):
  """Scores above `score` count fully, those equal to it by `weight`, so that k are selected."""

  score: jax.Array  # [] the k-th largest
  weight: jax.Array  # [] (k − above) / equal
  above: jax.Array  # [2] limbs
  equal: jax.Array  # [2] limbs


def kth_largest(x, y, ids, keep, axis=None):
  """Mined for k = ⌈keep × negatives⌉ of the scores x @ y.T; x, y [n, D], ids a tuple of [n]."""
  columns, column_ids = pairs.gather((y, ids), axis)  # [N, D], [N]
  strips = pairs.strips((x, ids))
  k = _share(_negatives(strips, column_ids, axis), keep)
  length = jnp.sqrt(jnp.max(jnp.sum(x * x, axis=1)) * jnp.max(jnp.sum(columns**2, axis=1)))
  bound = 1.01 * pairs.largest(length, axis)  # no score is larger
  outer = (_to_int(-bound), _to_int(bound))
  inner = _guess(x, columns, ids, column_ids, keep, axis)

  def narrow(state):
    passes, outer, inner, _, _ = state
    low, high = inner
    groups, above = _pass(strips, columns, column_ids, low, high, axis)
    inside = _count(groups.count, axis)
    found = _search(groups, k - above, inner, axis)
    too_low, too_high = _at_least(above, k), ~_at_least(above + inside, k)
    outer = (
      jnp.where(too_low, high + 1, jnp.where(too_high, outer[0], found[0])),
      jnp.where(too_low, outer[1], jnp.where(too_high, low - 1, found[1])),
    )
    over, at = _ranks(groups, found[0], axis, strict=True), _ranks(groups, found[0], axis)
    exact = (found[0] == found[1]) & jnp.all(over[0] == over[1]) & jnp.all(at[0] == at[1])
    slow = _width(outer) > _width(inner) // 4
    inner = (jnp.where(slow, _middle(*outer), outer[0]), outer[1])
    counts = (above + over[0], at[0] - over[0])
    return passes + 1, outer, inner, counts, exact & ~too_low & ~too_high

  def unsettled(state):
    passes, *_, exact = state
    return ~exact & (passes < PASSES)

  nothing = jnp.zeros(2, jnp.int32)
  broken = ~jnp.isfinite(bound)  # the loss will be NaN; do not look for what is not there
  state = (0, outer, inner, (nothing, nothing), broken)
  _, _, (low, _), (above, equal), _ = lax.while_loop(unsettled, narrow, state)
  weight = _to_float(k - above) / jnp.maximum(_to_float(equal), 1)
  return Mined(_to_score(low), weight, _carry(above), _carry(equal))


def kth_largest_of_rows(scores, keep):  # [R, N], −inf where not a negative -> [R], [R]
  """Score and weight as in Mined for each row, by bisection."""
  p, q = pairs.share(keep)
  count = jnp.sum(scores > -jnp.inf, axis=1)
  k = count // q * p + -(-(count % q * p) // q)  # ⌈count·p/q⌉ without overflow
  high = _to_int(jnp.max(scores, axis=1))
  low = _to_int(jnp.min(scores, axis=1, where=scores > -jnp.inf, initial=jnp.inf))

  def step(bracket):
    low, high = bracket
    middle = _middle(low, high)
    enough = jnp.sum(scores >= _to_score(middle)[:, None], axis=1) >= k
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

  low, _ = lax.while_loop(lambda b: jnp.any(b[0] < b[1]), step, (low, high))
  score = _to_score(low)
  above = jnp.sum(scores > score[:, None], axis=1)
  equal = jnp.sum(scores == score[:, None], axis=1)
  return score[:, None], ((k - above) / jnp.maximum(equal, 1))[:, None]


def weights(scores, score, weight):
  """1 above the score, weight at it, 0 below."""
  return jnp.where(scores > score, 1.0, jnp.where(scores == score, weight, 0.0))


def selected(scores, score):  # [R, N], [] -> int32 [2, N]
  """How many scores of each column lie above and at the score."""
  counts = (scores > score) + ((scores == score).astype(jnp.int32) << FIELD)
  counts = jnp.sum(counts, axis=0)
  return jnp.stack([counts & ((1 << FIELD) - 1), counts >> FIELD])


def agrees(mined, selected, axis):  # Mined, int32 [2, N] -> bool []
  """Whether a later sweep has selected just what was mined."""
  above, equal = _count(selected[0], axis), _count(selected[1], axis)
  return jnp.all(above == mined.above) & jnp.all(equal == mined.equal)


class _Groups(NamedTuple):
  count: jax.Array  # int32 [..., N]: scores in the bracket
  highest: jax.Array  # of these
  lowest: jax.Array


def _pass(strips, columns, column_ids, low, high, axis):
  """One sweep over the scores: the groups for the bracket, and how many scores lie above it."""
  low, high = _to_score(low), _to_score(high)
  rows = strips[0][0].shape[1]
  group = math.gcd(rows, 1 << max(5, (len(columns).bit_length()) // 2))  # about √N rows
  mask = (1 << FIELD) - 1

  def step(above, strip):
    (x, ids), real = strip
    scores = pairs.scores(x, columns, ids, column_ids, real).reshape(-1, group, len(columns))
    counts = (scores >= low) + ((scores > high).astype(jnp.int32) << FIELD)
    counts = jnp.sum(counts, axis=1)
    over = counts >> FIELD
    highest = jnp.max(jnp.where(scores <= high, scores, -jnp.inf), axis=1)
    lowest = jnp.min(jnp.where(scores >= low, scores, jnp.inf), axis=1)
    inside = (counts & mask) - over
    highest = jnp.where(inside > 0, highest, -jnp.inf)
    lowest = jnp.where(inside > 0, lowest, jnp.inf)
    return above + jnp.sum(over, axis=0), _Groups(inside, highest, lowest)

  above = pairs.varying(jnp.zeros(len(columns), jnp.int32), axis)
  above, groups = lax.scan(step, above, strips)
  return groups, _count(above, axis)


def _ranks(groups, t, axis, strict=False):  # -> [2], [2]
  """Least and greatest number of scores ≥ t (strict: > t) in the bracket that the groups allow."""
  t = _to_score(t)
  every, some = groups.lowest >= t, groups.highest >= t
  if strict:
    every, some = groups.lowest > t, groups.highest > t
  least = jnp.where(every, groups.count, some)
  most = jnp.where(every, groups.count, jnp.where(some, groups.count - 1, 0))
  return _count(least, axis), _count(most, axis)


def _search(groups, rank, bracket, axis):
  """The narrower bracket in which the groups allow the score of this rank to lie."""

  def together(state):  # as long as both bounds point to the same side
    low, high, _ = state
    t = _middle(low, high)
    least, most = _ranks(groups, t, axis)
    higher, lower = _at_least(least, rank), ~_at_least(most, rank)
    split = ~(higher | lower)
    return jnp.where(higher, t, low), jnp.where(lower, t - 1, high), split

  def apart(_, state):  # then a few steps more for each
    low, low_end, high_end, high = state
    t, u = _middle(low, low_end), _middle(high_end, high)
    higher = _at_least(_ranks(groups, t, axis)[0], rank)
    lower = ~_at_least(_ranks(groups, u, axis)[1], rank)
    low, low_end = jnp.where(higher, t, low), jnp.where(higher, low_end, jnp.maximum(t - 1, low))
    high_end, high = jnp.where(lower, high_end, u), jnp.where(lower, u - 1, high)
    return low, low_end, high_end, jnp.maximum(high, high_end)

  low, high, split = lax.while_loop(lambda s: (s[0] < s[1]) & ~s[2], together, (*bracket, False))
  middle = _middle(low, high)
  steps = jnp.where(split, 6, 0)
  low, _, _, high = lax.fori_loop(0, steps, apart, (low, middle, middle, high))
  return low, high


def _guess(x, columns, ids, column_ids, keep, axis):
  """A bracket in which the k-th largest score should lie, from 128 scores of each row."""
  width = min(SAMPLE, len(x))
  blocks = len(x) // width
  first = 0 if axis is None else lax.axis_index(axis) * blocks
  chosen = first + jnp.arange(blocks)[:, None] + jnp.arange(width) * (len(columns) // width)
  chosen %= len(columns)  # [blocks, width]: each block of rows meets other columns

  def cut(a):
    return a[: blocks * width].reshape(blocks, width, *a.shape[1:])

  scores = jax.vmap(pairs.scores)(
    cut(x), columns[chosen], jax.tree.map(cut, ids), jax.tree.map(lambda i: i[chosen], column_ids)
  )
  size = pairs.total(jnp.sum(scores > -jnp.inf), axis).astype(jnp.float32)
  rank, error = keep * size, 4 * jnp.sqrt(keep * (1 - keep) * size) + 2
  top = pairs.largest(jnp.max(scores), axis)
  bottom = -pairs.largest(jnp.max(jnp.where(scores > -jnp.inf, -scores, -jnp.inf)), axis)

  def at(rank):
    def step(_, bracket):
      low, high = bracket
      middle = low + (high - low) / 2
      enough = pairs.total(jnp.sum(scores >= middle), axis) >= rank
      return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    return lax.fori_loop(0, 14, step, (bottom, top))

  return _to_int(at(rank + error)[0]), _to_int(at(rank - error)[1])


def _negatives(strips, column_ids, axis):  # -> [2]
  def step(total, strip):
    (_, ids), real = strip
    negative = pairs.negatives(ids, column_ids)
    if real is not None:
      negative &= real[:, None]
    return total + jnp.sum(negative, axis=0, dtype=jnp.int32), None

  total = pairs.varying(jnp.zeros(len(column_ids[0]), jnp.int32), axis)
  return _count(lax.scan(step, total, strips)[0], axis)


def _share(count, keep):  # [2] -> [2]
  """⌈count·p/q⌉ by long division."""
  p, q = pairs.share(keep)
  high, low = count
  rest = (high % q << LIMB) + low
  return _carry(jnp.stack([high // q * p, rest // q * p + -(-(rest % q * p) // q)]))


def _count(x, axis):  # int32 [..., N], not negative -> [2]
  """The sum over all devices."""
  x = jnp.sum(x.reshape(-1, x.shape[-1]), axis=0)
  x = jnp.stack([jnp.sum(x >> LIMB), jnp.sum(x & ((1 << LIMB) - 1))])
  return _carry(pairs.total(x, axis))


def _carry(x):  # [2] -> [2], 0 ≤ low < 2^LIMB
  return jnp.stack([x[0] + (x[1] >> LIMB), x[1] & ((1 << LIMB) - 1)])


def _at_least(a, b):
  return _carry(a - b)[0] >= 0


def _to_float(x):  # [2] -> []
  return x[0].astype(jnp.float32) * (1 << LIMB) + x[1]


def _to_int(score):
  """float32 -> int32 in the same order."""
  bits = lax.bitcast_convert_type(score, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _to_score(i):
  """int32 -> float32, the inverse; subnormals, which hardware takes for zero, become zero."""
  score = lax.bitcast_convert_type(jnp.where(i < 0, i ^ 0x7FFFFFFF, i), jnp.float32)
  return jnp.where(jnp.abs(score) < jnp.finfo(jnp.float32).tiny, 0, score)


def _middle(low, high):
  """⌈(low + high) / 2⌉ without overflow."""
  return (low | high) - ((low ^ high) >> 1)


def _width(bracket):
  low, high = bracket
  return high.astype(jnp.uint32) - low.astype(jnp.uint32)
