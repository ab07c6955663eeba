"""The exact k-th largest score of a matrix that is never held, on any number of devices.

A pass computes the scores strip by strip and lets groups of them report on a bracket [low, high]
that should contain the k-th largest: how many scores of the group lie in it, the highest of these
and the lowest. That bounds the rank of any threshold t, for of c scores all are ≥ t if the lowest
is, none if the highest is not, and otherwise between 1 and c − 1. Searching both bounds for rank k
leaves a narrower bracket, and the k-th largest itself once no group in doubt straddles it.

The first bracket comes from a sample and one exact count at its quantile. It is so narrow that
hardly a group holds more than two scores: one pass is enough as a rule. When crowded groups keep a
bracket wide, the next pass looks at half of it, so that few passes suffice whatever the scores.

Counts and thresholds are those of exact.py; thresholds are searched as integers and compared as
floats. Only counts, and a few extremes, cross devices.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import exact, pairs

SAMPLE = 64  # scores that each row gives to the first guess
GROUP = 64  # rows of a strip that report together
SLOTS = 32  # strips i, i + 32, i + 64, … report together, so that memory stays linear in N
PASSES = 100  # more than bisection alone needs


class Mined(NamedTuple):
  """Scores above `score` count fully, those equal to it by `weight`, so that k are selected."""

  score: jax.Array  # [] the k-th largest
  weight: jax.Array  # [] (k − above) / equal
  above: jax.Array  # [2]
  equal: jax.Array  # [2]


def kth_largest(x, y, ids, keep, axis=None):  # [n, D], [n, D], tuple of [n] -> Mined
  """Of the negatives of x @ y.T: k = ⌈keep × their number⌉."""
  columns, column_ids = pairs.gather((y, ids), axis)
  matrix = _Matrix(pairs.strips((x, ids), len(columns)), columns, column_ids, axis)
  negatives = matrix.count(matrix.negative)
  k = exact.share(negatives, keep)
  length = jnp.sqrt(jnp.max(jnp.sum(x * x, axis=1)) * jnp.max(jnp.sum(matrix.y**2, axis=1)))
  bound = 1.01 * pairs.largest(length, axis)  # no score is larger

  def narrow(state):
    step, outer, (low, high), _, _ = state  # the k-th largest is in outer, perhaps in (low, high)
    groups, above = matrix.report(exact.to_score(low), exact.to_score(high))
    rank, inside = exact.carry(k - above), exact.count(groups.count, axis)
    missed_above, missed_below = exact.at_least(above, k), ~exact.at_least(above + inside, k)
    found = _search(groups, rank, inside, low, high, axis)
    over, at = _ranks(groups, found[0], axis, strict=True), _ranks(groups, found[0], axis)
    certain = (found[0] == found[1]) & jnp.all(over[0] == over[1]) & jnp.all(at[0] == at[1])
    outer = (
      jnp.where(missed_above, high + 1, jnp.where(missed_below, outer[0], found[0])),
      jnp.where(missed_above, outer[1], jnp.where(missed_below, low - 1, found[1])),
    )
    crowded = exact.width(*outer) > exact.width(low, high) // 4
    inner = (jnp.where(crowded, exact.between(*outer, step), outer[0]), outer[1])
    counts = (above + over[0], at[0] - over[0])
    return step + 1, outer, inner, counts, certain & ~missed_above & ~missed_below

  def unsettled(state):
    step, *_, certain = state
    return ~certain & (step < PASSES)

  outer = (exact.to_int(-bound), exact.to_int(bound))
  inner = _guess(x, ids, matrix, keep, k, negatives)
  nothing = jnp.zeros(2, jnp.int32)
  broken = ~jnp.isfinite(bound)  # the loss will be NaN: there is nothing to find
  state = (0, outer, inner, (nothing, nothing), broken)
  with jax.named_scope("passes"):
    _, _, (low, _), (above, equal), _ = lax.while_loop(unsettled, narrow, state)
  weight = exact.to_float(k - above) / jnp.maximum(exact.to_float(equal), 1)
  return Mined(exact.to_score(low), weight, exact.carry(above), exact.carry(equal))


def kth_largest_of_rows(scores, keep):  # [R, N] -> [R, 1], [R, 1]
  """Score and weight as in Mined for each row of scores that are at hand, by interpolation."""
  p, q = pairs.share(keep)
  size = jnp.sum(scores > -jnp.inf, axis=1)
  k = size // q * p + -(-(size % q * p) // q)  # ⌈size·p/q⌉ without overflow

  def settled(state):
    _, low, high, at_low, over_high = state  # how many scores are ≥ low, > high
    return (low >= high) | (at_low == k) | (over_high == k - 1)

  def narrow(state):
    step, low, high, at_low, over_high = state
    part = (at_low - k + 0.5) / jnp.maximum(at_low - over_high, 1)
    t = exact.between(low, high, step, jnp.where(step % 4 < 2, part, 0.5))
    hits = jnp.sum(scores >= exact.to_score(t)[:, None], axis=1)
    higher, lower = (hits >= k) & ~settled(state), (hits < k) & ~settled(state)
    low, at_low = jnp.where(higher, t, low), jnp.where(higher, hits, at_low)
    high, over_high = jnp.where(lower, t - 1, high), jnp.where(lower, hits, over_high)
    return step + 1, low, high, at_low, over_high

  lowest = jnp.min(jnp.where(scores > -jnp.inf, scores, jnp.inf), axis=1)
  highest = jnp.max(scores, axis=1)
  state = (0, exact.to_int(lowest), exact.to_int(highest), size, jnp.zeros_like(size))
  with jax.named_scope("halvings_of_rows"):
    _, low, high, at_low, _ = lax.while_loop(lambda s: ~jnp.all(settled(s)), narrow, state)
  lowest = jnp.min(jnp.where(scores >= exact.to_score(low)[:, None], scores, jnp.inf), axis=1)
  highest = jnp.max(jnp.where(scores <= exact.to_score(high)[:, None], scores, -jnp.inf), axis=1)
  score = jnp.where(at_low == k, lowest, highest)[:, None]
  above, equal = jnp.sum(scores > score, axis=1), jnp.sum(scores == score, axis=1)
  return score, ((k - above) / jnp.maximum(equal, 1))[:, None]


def weights(scores, score, weight):
  """1 above the score, weight at it, 0 below."""
  return jnp.where(scores > score, 1.0, jnp.where(scores == score, weight, 0.0))


def selected(scores, score):  # [R, N], [] -> int32 [2, N]
  """How many scores of each column lie above and at the score."""
  return _two_counts(scores > score, scores == score, axis=0)


def agrees(mined, selected, axis):  # Mined, int32 [2, N] -> bool []
  """Whether a later sweep has selected just what was mined."""
  above, equal = exact.count(selected[0], axis), exact.count(selected[1], axis)
  return jnp.all(above == mined.above) & jnp.all(equal == mined.equal)


class _Groups(NamedTuple):
  count: jax.Array  # int32 [slots, R / group, N]: scores in the bracket
  highest: jax.Array  # of these, or −inf
  lowest: jax.Array  # of these, or inf


class _Matrix(NamedTuple):
  """Scores that are computed whenever they are looked at."""

  strips: tuple  # ((x [S, R, D], ids of [S, R]), real)
  y: jax.Array  # [N, D]
  ids: tuple  # of [N]
  axis: str | None

  def negative(self, strip):  # -> bool [R, N]
    (_, ids), real = strip
    return pairs.negatives(ids, self.ids, real)

  def scores(self, strip):  # -> [R, N], −inf where not a negative
    (x, ids), real = strip
    return pairs.scores(x, self.y, ids, self.ids, real)

  def count(self, hits):  # (strip -> bool [R, N]) -> [2]
    """How many pairs there are for which `hits` is true."""

    def step(total, strip):
      return total + jnp.sum(hits(strip), axis=0, dtype=jnp.int32), None

    total = pairs.varying(jnp.zeros(len(self.y), jnp.int32), self.axis)
    return exact.count(lax.scan(step, total, self.strips)[0], self.axis)

  def report(self, low, high):  # -> _Groups, [2]
    """What the groups say about a bracket, and how many scores lie above it."""
    strips, rows = self.strips[0][0].shape[:2]
    slots, group = min(strips, SLOTS), math.gcd(rows, GROUP)

    def step(carry, strip):
      slot, above, groups = carry
      scores = self.scores(strip).reshape(-1, group, len(self.y))
      inside, over = _two_counts((scores >= low) & (scores <= high), scores > high, axis=1)
      highest = jnp.max(jnp.where(scores <= high, scores, -jnp.inf), axis=1)
      lowest = jnp.min(jnp.where(scores >= low, scores, jnp.inf), axis=1)
      groups = _Groups(
        groups.count.at[slot].add(inside),
        groups.highest.at[slot].max(jnp.where(inside > 0, highest, -jnp.inf)),
        groups.lowest.at[slot].min(jnp.where(inside > 0, lowest, jnp.inf)),
      )
      return ((slot + 1) % slots, above + jnp.sum(over, axis=0), groups), None

    shape = (slots, rows // group, len(self.y))
    infinite = jnp.full(shape, jnp.inf)
    start = jnp.zeros(len(self.y), jnp.int32), _Groups(jnp.zeros(shape, int), -infinite, infinite)
    start = (0, *pairs.varying(start, self.axis))
    (_, above, groups), _ = lax.scan(step, start, self.strips)
    return groups, exact.count(above, self.axis)


def _guess(x, ids, matrix, keep, k, negatives):
  """A bracket that should contain the k-th largest score."""
  axis, n = matrix.axis, len(matrix.y)
  width = min(SAMPLE, len(x))
  blocks = len(x) // width
  first = 0 if axis is None else lax.axis_index(axis) * blocks
  # Each block of rows meets columns of its own, spread over the batch.
  chosen = (first + jnp.arange(blocks)[:, None] + jnp.arange(width) * (n // width)) % n

  def cut(a):  # [n, ...] -> [blocks, width, ...]
    return a[: blocks * width].reshape(blocks, width, *a.shape[1:])

  rows, columns = jax.tree.map(cut, (x, ids)), jax.tree.map(lambda a: a[chosen], matrix[1:3])
  sample = jax.vmap(pairs.scores)(rows[0], columns[0], rows[1], columns[1])
  size = pairs.total(jnp.sum(sample > -jnp.inf), axis).astype(jnp.float32)
  top = pairs.largest(jnp.max(sample), axis)
  bottom = -pairs.largest(jnp.max(jnp.where(sample > -jnp.inf, -sample, -jnp.inf)), axis)

  def quantile(rank):
    def halve(_, bracket):
      low, high = bracket
      middle = low + (high - low) / 2
      enough = pairs.total(jnp.sum(sample >= middle), axis) >= rank
      return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    return lax.fori_loop(0, 14, halve, (bottom, top))

  error = 4 * jnp.sqrt(keep * (1 - keep) * size) + 2  # four standard deviations of the rank
  low, high = quantile(keep * size + error)[0], quantile(keep * size - error)[1]
  # One exact count half-way, a step along the density, and what that step may be wrong by.
  middle = low + (high - low) / 2
  missing = matrix.count(lambda strip: matrix.scores(strip) >= middle) - k
  missing = exact.to_float(exact.carry(missing))
  expected = error * exact.to_float(negatives) / jnp.maximum(size, 1)
  spacing = (high - low) / 2 / jnp.maximum(expected, 1)
  middle += missing * spacing
  error = (0.07 * jnp.abs(missing) + 3 * jnp.sqrt(jnp.abs(missing)) + 16) * spacing
  smooth = jnp.abs(missing) < expected  # otherwise there are steps, not a density
  low, high = jnp.where(smooth, middle - error, low), jnp.where(smooth, middle + error, high)
  return exact.to_int(low), exact.to_int(high)


def _search(groups, rank, inside, low, high, axis):
  """The narrower bracket in which the groups allow the score of this rank to lie."""
  wanted = exact.to_float(rank)

  def together(state):  # as long as both bounds point to the same side
    step, low, high, at_low, over_high, *_ = state
    part = (at_low - wanted + 0.5) / jnp.maximum(at_low - over_high, 1)
    t = exact.between(low, high, step, jnp.where(step % 4 < 2, part, 0.5))
    least, most = _ranks(groups, t, axis)
    higher, lower = exact.at_least(least, rank), ~exact.at_least(most, rank)
    low, at_low = jnp.where(higher, t, low), jnp.where(higher, exact.to_float(least), at_low)
    high, over_high = (
      jnp.where(lower, t - 1, high),
      jnp.where(lower, exact.to_float(most), over_high),
    )
    hit = jnp.all((least == rank) & (most == rank))
    return step + 1, low, high, at_low, over_high, t, hit, ~(higher | lower)

  def apart(step, state):  # then each by itself, but only so far: another pass follows
    low, low_end, high_end, high = state
    t, u = exact.between(low, low_end, step), exact.between(high_end, high, step)
    higher = exact.at_least(_ranks(groups, t, axis)[0], rank)
    lower = ~exact.at_least(_ranks(groups, u, axis)[1], rank)
    low, low_end = jnp.where(higher, t, low), jnp.where(higher, low_end, jnp.maximum(t - 1, low))
    high_end, high = (
      jnp.where(lower, high_end, u),
      jnp.where(lower, jnp.maximum(u - 1, high_end), high),
    )
    return low, low_end, high_end, high

  state = (0, low, high, exact.to_float(inside), jnp.float32(0), low, False, False)
  with jax.named_scope("halvings_together"):
    state = lax.while_loop(lambda s: (s[1] < s[2]) & ~s[-2] & ~s[-1], together, state)
  _, low, high, _, _, t, hit, split = state
  with jax.named_scope("halvings_apart"):
    low, _, _, high = lax.fori_loop(0, jnp.where(split, 8, 0), apart, (low, t, t, high))
  # A hit: just so many scores are ≥ low. The lowest of them, which its group reports, is the one.
  floor = exact.to_score(low)
  lowest = [jnp.min(jnp.where(x >= floor, x, jnp.inf)) for x in (groups.lowest, groups.highest)]
  lowest = exact.to_int(-pairs.largest(-jnp.minimum(*lowest), axis))
  return jnp.where(hit, lowest, low), jnp.where(hit, lowest, high)


def _ranks(groups, t, axis, strict=False):  # -> [2], [2]
  """Least and greatest number of scores ≥ t (strict: > t) in the bracket that the groups allow."""
  t = exact.to_score(t)
  every, some = groups.lowest >= t, groups.highest >= t
  if strict:
    every, some = groups.lowest > t, groups.highest > t
  least = jnp.where(every, groups.count, some)
  most = jnp.where(every, groups.count, jnp.where(some, groups.count - 1, 0))
  return exact.count(least, axis), exact.count(most, axis)


def _two_counts(a, b, axis):  # bool, bool -> int32 [2, ...]
  """Both sums in one: two counts to an int32, for strips of less than 2¹⁵ rows."""
  bits = a.shape[axis].bit_length()
  both = jnp.sum(a + (b.astype(jnp.int32) << bits), axis=axis)
  return jnp.stack([both & ((1 << bits) - 1), both >> bits])
