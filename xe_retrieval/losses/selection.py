"""The exact k-th largest score of a matrix that is never held, on any number of devices.

The search keeps a bracket [low, high] that should contain the k-th largest. A pass computes the
scores strip by strip and keeps three numbers of each group of scores: how many lie in the bracket,
the highest of these and the lowest. That bounds the rank of any threshold t: of the c scores of a
group, all are ≥ t if the lowest is, none if the highest is not, and otherwise between 1 and c − 1.
Bisecting both bounds for rank k leaves a narrower bracket, or the k-th largest itself once the
bounds agree there.

The first bracket (first_bracket.py) is so narrow that hardly a group holds more than two scores, so
one pass is enough as a rule. When crowded groups keep a bracket wide, the next pass takes half of
it, which bounds the number of passes for any distribution of scores.

Thresholds are bisected as integers and compared as floats (wide_counts.py). Devices exchange only
counts and a few extremes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xe_retrieval.losses import collectives, pair_scores, tied_scores, wide_counts
from xe_retrieval.losses.first_bracket import first_bracket
from xe_retrieval.losses.tied_scores import Mined

GROUP = 64  # rows of a strip in one group, column by column
SLOTS = 32  # strips i, i + 32, i + 64, … share their groups, so that memory stays linear in N
PASSES = 100  # more than bisection alone needs


def kth_largest(x, y, ids, keep, axis=None):  # [n, D], [n, D], tuple of [n] -> Mined
  """The ⌈keep × count⌉-th largest of the negatives of x @ y.T, `count` being their number."""
  columns, column_ids = collectives.gather((y, ids), axis)
  matrix = _Matrix(pair_scores.strips((x, ids), len(columns)), columns, column_ids, axis)
  negatives = matrix.count(matrix.negative)
  k = wide_counts.share(negatives, keep)
  length = jnp.sqrt(jnp.max(jnp.sum(x * x, axis=1)) * jnp.max(jnp.sum(matrix.y**2, axis=1)))
  bound = 1.01 * collectives.largest(length, axis)  # no score is larger, by Cauchy–Schwarz

  def narrow(state):
    step, outer, (low, high), _, _ = state  # the k-th largest is in outer, likely in (low, high)
    groups, above = matrix.report(wide_counts.to_score(low), wide_counts.to_score(high))
    rank, inside = wide_counts.carry(k - above), wide_counts.count(groups.count, axis)
    missed_above = wide_counts.at_least(above, k)
    missed_below = ~wide_counts.at_least(above + inside, k)
    found = _search(groups, rank, inside, low, high, axis)
    over, at = _ranks(groups, found[0], axis, strict=True), _ranks(groups, found[0], axis)
    certain = (found[0] == found[1]) & jnp.all(over[0] == over[1]) & jnp.all(at[0] == at[1])
    outer = (
      jnp.where(missed_above, high + 1, jnp.where(missed_below, outer[0], found[0])),
      jnp.where(missed_above, outer[1], jnp.where(missed_below, low - 1, found[1])),
    )
    # The pass narrowed the bracket less than fourfold: bisect it for the next one.
    crowded = wide_counts.width(*outer) > wide_counts.width(low, high) // 4
    inner = (jnp.where(crowded, wide_counts.between(*outer, step), outer[0]), outer[1])
    counts = (above + over[0], at[0] - over[0])
    return step + 1, outer, inner, counts, certain & ~missed_above & ~missed_below

  def unsettled(state):
    step, *_, certain = state
    return ~certain & (step < PASSES)

  outer = (wide_counts.to_int(-bound), wide_counts.to_int(bound))
  inner = first_bracket(x, ids, matrix, keep, k, negatives)
  zero = jnp.zeros(2, jnp.int32)
  nonfinite = ~jnp.isfinite(bound)  # the loss will be NaN: skip the search
  state = (0, outer, inner, (zero, zero), nonfinite)
  with jax.named_scope("passes"):
    _, _, (low, _), (above, equal), certain = lax.while_loop(unsettled, narrow, state)
  score = jnp.where(certain, wide_counts.to_score(low), jnp.nan)
  ties, wanted = wide_counts.to_float(equal), wide_counts.to_float(k)
  tied = ties > tied_scores.TIED * wanted
  return Mined(
    score=jnp.where(wanted == 0, 0, score),
    weight=wide_counts.to_float(k - above) / jnp.maximum(ties, 1),
    k=k,
    above=wide_counts.carry(above),
    equal=wide_counts.carry(equal),
    tied=tied,
    margin=jnp.where(tied, tied_scores.ROUNDING * bound, 0),
  )


def kth_largest_of_rows(scores, keep):  # [R, N] -> [R, 1], [R, 1]
  """Score and weight of Mined for each row, by interpolation and bisection."""
  size = jnp.sum(scores > -jnp.inf, axis=1)
  k = wide_counts.share_of_int(size, keep)

  def settled(state):
    _, low, high, at_low, over_high = state  # numbers of scores ≥ low and > high
    return (low >= high) | (at_low == k) | (over_high == k - 1)

  def narrow(state):
    step, low, high, at_low, over_high = state
    part = (at_low - k + 0.5) / jnp.maximum(at_low - over_high, 1)
    t = wide_counts.between(low, high, step, jnp.where(step % 4 < 2, part, 0.5))
    hits = jnp.sum(scores >= wide_counts.to_score(t)[:, None], axis=1)
    higher, lower = (hits >= k) & ~settled(state), (hits < k) & ~settled(state)
    low, at_low = jnp.where(higher, t, low), jnp.where(higher, hits, at_low)
    high, over_high = jnp.where(lower, t - 1, high), jnp.where(lower, hits, over_high)
    return step + 1, low, high, at_low, over_high

  lowest = jnp.min(jnp.where(scores > -jnp.inf, scores, jnp.inf), axis=1)
  highest = jnp.max(scores, axis=1)
  state = (0, wide_counts.to_int(lowest), wide_counts.to_int(highest), size, jnp.zeros_like(size))
  with jax.named_scope("halvings_of_rows"):
    _, low, high, at_low, _ = lax.while_loop(lambda s: ~jnp.all(settled(s)), narrow, state)
  lowest = jnp.min(jnp.where(scores >= wide_counts.to_score(low)[:, None], scores, jnp.inf), axis=1)
  highest = jnp.max(
    jnp.where(scores <= wide_counts.to_score(high)[:, None], scores, -jnp.inf), axis=1
  )
  score = jnp.where(at_low == k, lowest, highest)[:, None]
  above, equal = jnp.sum(scores > score, axis=1), jnp.sum(scores == score, axis=1)
  return score, ((k - above) / jnp.maximum(equal, 1))[:, None]


def weights(scores, score, weight):
  """1 above the score, weight at it, 0 below."""
  return jnp.where(scores > score, 1.0, jnp.where(scores == score, weight, 0.0))


class _Groups(NamedTuple):
  count: jax.Array  # int32 [slots, R / group, N]: scores in the bracket
  highest: jax.Array  # of these, or −inf
  lowest: jax.Array  # of these, or inf


class _Matrix(NamedTuple):
  """The score matrix, recomputed strip by strip at every use."""

  strips: tuple  # ((x [S, R, D], ids of [S, R]), real)
  y: jax.Array  # [N, D]
  ids: tuple  # of [N]
  axis: str | None

  def negative(self, strip):  # -> bool [R, N]
    (_, ids), real = strip
    return pair_scores.negatives(ids, self.ids, real)

  def scores(self, strip):  # -> [R, N], −inf where not a negative
    (x, ids), real = strip
    return pair_scores.scores(x, self.y, ids, self.ids, real)

  def count(self, hits):  # (strip -> bool [R, N]) -> [2]
    """The number of pairs for which `hits` is true."""

    def step(total, strip):
      return total + jnp.sum(hits(strip), axis=0, dtype=jnp.int32), None

    total = collectives.varying(jnp.zeros(len(self.y), jnp.int32), self.axis)
    return wide_counts.count(lax.scan(step, total, self.strips)[0], self.axis)

  def report(self, low, high):  # -> _Groups, [2]
    """The groups of one pass, and how many scores lie above the bracket."""
    strips, rows = self.strips[0][0].shape[:2]
    slots, group = min(strips, SLOTS), math.gcd(rows, GROUP)

    def step(carry, strip):
      slot, above, groups = carry
      scores = self.scores(strip).reshape(-1, group, len(self.y))
      inside = (scores >= low) & (scores <= high)
      inside, over = tied_scores.two_counts(inside, scores > high, axis=1)
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
    start = (0, *collectives.varying(start, self.axis))
    (_, above, groups), _ = lax.scan(step, start, self.strips)
    return groups, wide_counts.count(above, self.axis)


def _search(groups, rank, inside, low, high, axis):
  """The narrower bracket that must hold the score of this rank, given the groups."""
  wanted = wide_counts.to_float(rank)

  def together(state):  # while both bounds of the rank are on the same side of it
    step, low, high, at_low, over_high, *_ = state
    part = (at_low - wanted + 0.5) / jnp.maximum(at_low - over_high, 1)
    t = wide_counts.between(low, high, step, jnp.where(step % 4 < 2, part, 0.5))
    least, most = _ranks(groups, t, axis)
    higher, lower = wide_counts.at_least(least, rank), ~wide_counts.at_least(most, rank)
    low, high = jnp.where(higher, t, low), jnp.where(lower, t - 1, high)
    at_low = jnp.where(higher, wide_counts.to_float(least), at_low)
    over_high = jnp.where(lower, wide_counts.to_float(most), over_high)
    hit = jnp.all((least == rank) & (most == rank))
    return step + 1, low, high, at_low, over_high, t, hit, ~(higher | lower)

  def apart(step, state):  # then one bisection per bound, a few steps: another pass follows
    low, low_end, high_end, high = state
    t, u = wide_counts.between(low, low_end, step), wide_counts.between(high_end, high, step)
    higher = wide_counts.at_least(_ranks(groups, t, axis)[0], rank)
    lower = ~wide_counts.at_least(_ranks(groups, u, axis)[1], rank)
    return (
      jnp.where(higher, t, low),
      jnp.where(higher, low_end, jnp.maximum(t - 1, low)),
      jnp.where(lower, high_end, u),
      jnp.where(lower, jnp.maximum(u - 1, high_end), high),
    )

  state = (0, low, high, wide_counts.to_float(inside), jnp.float32(0), low, False, False)
  with jax.named_scope("halvings_together"):
    state = lax.while_loop(lambda s: (s[1] < s[2]) & ~s[-2] & ~s[-1], together, state)
  _, low, high, _, _, t, hit, split = state
  with jax.named_scope("halvings_apart"):
    low, _, _, high = lax.fori_loop(0, jnp.where(split, 8, 0), apart, (low, t, t, high))
  # A hit: exactly `rank` scores of the bracket are ≥ low, so the lowest of these is the result.
  floor = wide_counts.to_score(low)
  lowest = [jnp.min(jnp.where(x >= floor, x, jnp.inf)) for x in (groups.lowest, groups.highest)]
  lowest = wide_counts.to_int(-collectives.largest(-jnp.minimum(*lowest), axis))
  return jnp.where(hit, lowest, low), jnp.where(hit, lowest, high)


def _ranks(groups, t, axis, strict=False):  # -> [2], [2]
  """Bounds on the number of scores ≥ t (strict: > t) in the bracket, given the groups."""
  t = wide_counts.to_score(t)
  every, some = groups.lowest >= t, groups.highest >= t
  if strict:
    every, some = groups.lowest > t, groups.highest > t
  least = jnp.where(every, groups.count, some)
  most = jnp.where(every, groups.count, jnp.where(some, groups.count - 1, 0))
  return wide_counts.count(least, axis), wide_counts.count(most, axis)
