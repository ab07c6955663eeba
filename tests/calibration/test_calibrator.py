"""The calibrator on scores whose true log-odds are known."""

import json

import numpy as np
import pytest

from tests.calibration.conftest import own_image, pairs_with, true_log_odds, two_normals
from xe_retrieval.calibration import calibrator as calibrators
from xe_retrieval.calibration import fitting, promises
from xe_retrieval.calibration.calibrator import CELL, MIDDLES, Calibrator, Queries


def known(level, spread=None, familiarity=None):
  """Queries of which only some is known."""
  zeros = np.zeros(len(level))
  return Queries(level, *(zeros if x is None else x for x in (spread, familiarity)))


def test_recovers_the_true_log_odds():
  scores, right = two_normals(np.random.default_rng(0), 2000, 100)
  queries = known(np.zeros(2000))
  found, _ = fitting.fit(*pairs_with(scores, right), queries)
  assert len(found.curves) == 1
  at = np.linspace(0.2, 0.65, 10)
  np.testing.assert_allclose(
    found.logit(at[None], queries[:1])[0], true_log_odds(at, 1 / 100), atol=0.6
  )


def test_recovers_them_where_one_pair_of_50_000_is_relevant():
  """The optimiser must not stop early because relevant pairs are a small part of all."""
  density = [
    np.exp(-((MIDDLES - m) ** 2) / 0.02) / np.sqrt(0.02 * np.pi) * CELL for m in (0.5, 0.2)
  ]
  relevant, irrelevant = 5000 * density[0], 5000 * 50_000 * density[1]
  histogram = np.rint([[[relevant / 2, irrelevant / 2]]] * 2).astype(np.int64)
  none = known(np.zeros(10))
  found, _ = calibrators.fit(np.array([]), histogram, none)
  at = np.linspace(0.25, 0.65, 9)
  expected = true_log_odds(at, 1 / 50_001)
  np.testing.assert_allclose(found.logit(at[None], none[:1])[0], expected, atol=0.3)


@pytest.fixture(scope="module")
def vague_and_precise():
  """Fitted on one draw of both kinds of queries, and another draw: 0.45 means much from one."""
  random = np.random.default_rng(1)

  def draw():
    vague, right = two_normals(random, 600, 100, 0.05, False, (0.45, 0.4), 0.04)
    precise, also = two_normals(random, 600, 100, 0.05, False, (0.45, 0.1), 0.1)
    spread = np.concatenate([random.normal(0.04, 0.004, 600), random.normal(0.12, 0.01, 600)])
    queries = known(random.normal(0, 1, 1200), spread, random.uniform(0.3, 0.9, 1200))
    # Captions of both kinds in turn: every image has some of each.
    order = np.arange(1200).reshape(2, 600).T.ravel()
    scores, right = np.concatenate([vague, precise]), np.concatenate([right, also])
    return scores[order], right[order], queries[order]

  scores, right, queries = draw()
  return fitting.fit(*pairs_with(scores, right), queries)[0], draw()


def test_a_score_means_more_from_a_precise_query(vague_and_precise):
  found, (scores, right, queries) = vague_and_precise
  assert len(found.curves) >= 2
  one = Calibrator(np.array([]), *_one_curve(scores, right, queries))
  errors = []
  for calibrator in (found, one):
    z = calibrator.logit(scores, queries) - calibrator.log_familiar(queries.familiarity)[:, None]
    shown = 1 / (1 + np.exp(-z))
    kinds = [queries.spread < 0.08, queries.spread > 0.08]
    errors.append(
      max(promises.reliability(shown[k].ravel(), right[k].ravel())["ece"] for k in kinds)
    )
  assert errors[0] < 0.01 and errors[1] > 0.025


def _one_curve(scores, right, queries):
  found, _ = fitting.fit(*pairs_with(scores, right), known(np.zeros(len(queries))))
  return found.curves, found.familiar


def test_groups_that_do_not_differ_cost_nothing():
  random = np.random.default_rng(2)
  scores, right = two_normals(random, 1200, 60, 2 / 60, False)
  queries = known(random.normal(0, 1, 1200), random.normal(1, 0.1, 1200))
  found, _ = fitting.fit(*pairs_with(scores, right), queries)
  assert len(found.curves) <= 4
  scores, right = two_normals(random, 1200, 60, 2 / 60, False)
  shown = 1 / (1 + np.exp(-found.logit(scores, queries)))
  truth = 1 / (1 + np.exp(-true_log_odds(scores, 2 / 60)))
  loss = [-np.mean(np.log(np.where(right, p, 1 - p))) for p in (shown, truth)]
  assert loss[0] < 1.02 * loss[1]
  assert promises.reliability(shown.ravel(), right.ravel())["ece"] < 0.005


def test_rises_with_the_score_and_is_inverted(vague_and_precise):
  found, (_, _, queries) = vague_and_precise
  scores = np.tile(np.linspace(-1, 1, 401), (len(queries), 1))
  z = found.logit(scores, queries)
  assert (np.diff(z, axis=1) > 0).all()
  levels = np.linspace(-12, 12, 49)
  back = found.score(levels, queries)
  np.testing.assert_allclose(
    found.logit(back, queries), np.tile(levels, (len(queries), 1)), atol=1e-9
  )


def test_unfamiliar_queries_have_no_chance(vague_and_precise):
  found, (scores, _, queries) = vague_and_precise
  strange = Queries(queries.level[:3], queries.spread[:3], np.array([0.0, 0.29, 0.35]))
  z = found.logit(np.full((3, 1), 0.99), strange)[:, 0]
  usual = Queries(queries.level[:3], queries.spread[:3], np.full(3, 0.9))
  expected = found.logit(np.full((3, 1), 0.99), usual)[:, 0]
  assert (z[:2] < -1e3).all() and z[2] == expected[2]
  steep = Calibrator(np.array([]), [(np.array([0, 0.1]), np.array([0.0, 30.0]))], found.familiar)
  assert steep.logit(np.array([[2.0]]), strange[:1]) < -1e3  # the highest score there can be
  held = found.log_familiar(queries.familiarity)
  assert np.mean(held < 0) < 0.03


def test_familiarity_rises_from_nothing_to_one():
  found = Calibrator(np.array([]), [], np.linspace(0.2, 0.4, 21))
  np.testing.assert_allclose(
    np.exp(found.log_familiar(np.array([0.1, 0.25, 0.3, 0.4, 0.9]))),
    [0, 0.25, 0.5, 1, 1],
    atol=1e-9,
  )


def test_without_a_bank_there_is_one_group():
  scores, right = two_normals(np.random.default_rng(4), 300, 50)
  pairs, gallery, source = pairs_with(scores, right)
  queries = fitting.describe(None, pairs.text, None)
  found, counts = fitting.fit(pairs, gallery, source, queries)
  assert len(found.curves) == 1 and not len(found.familiar) and not len(found.cuts)
  assert (found.log_familiar(queries.familiarity) == 0).all()
  assert counts.positives == 300 and counts.queries == 300


def test_tree_halves_by_spread_then_familiarity_then_level():
  random = np.random.default_rng(5)
  queries = known(*(random.permutation(1280) / 1280 for _ in range(3)))
  cuts = calibrators.grow(queries)
  group = calibrators.assign(cuts, queries)
  assert len(cuts) == 63 and (np.bincount(group) == 20).all()
  for depth, values in enumerate((queries.spread, queries.familiarity, queries.level)):
    for part in range(2**depth):
      rows = group >> 6 - depth == part
      above = values[rows] > np.median(values[rows])
      np.testing.assert_array_equal((group[rows] >> 5 - depth) % 2, above)
  # The tree of fewer levels is the beginning of it.
  np.testing.assert_array_equal(calibrators.assign(cuts[:3], queries), group // 16)


def test_no_query_lies_on_a_cut():
  """A frequent caption is the median itself; its last bits must not decide about its group."""
  often = np.concatenate([np.full(200, 0.4), np.linspace(0, 1, 200)])
  queries = known(often, np.linspace(0, 1, 400))
  cuts = calibrators.grow(queries)
  for shift in (-1e-7, 1e-7):
    moved = known(queries.level + shift, queries.spread)
    same = calibrators.assign(cuts, moved) == calibrators.assign(cuts, queries)
    assert same[:200].all()


def test_pairs_are_counted_by_their_log_odds():
  scores, right = two_normals(np.random.default_rng(6), 60, 40, 0.03)
  made = pairs_with(scores, right)
  queries = known(np.zeros(60))
  calibrator, crossed = fitting.fit(*made, queries)
  counts = fitting.count(*made, queries, calibrator)
  # A calibration's own counts are made with curves that have not seen the counted queries.
  assert crossed.positives == counts.positives and (crossed.relevant != counts.relevant).any()
  z = calibrator.logit(made[0].text, queries)
  for i in (100, 200, 240, 300):
    passes = z >= fitting.counting.LEVELS[i]
    assert counts.relevant[i] == (passes & right).sum()
    assert counts.irrelevant[i] == (passes & ~right).sum()
    assert counts.answered[i] == passes.any(axis=1).sum()
    t = passes.sum(axis=1).reshape(-1, 5).sum(axis=1)  # five captions of an image
    assert counts.squares[3, i] == (t * t).sum()
    others = passes.copy()
    others[np.arange(60), own_image(60, 40)] = False
    both = others.sum(axis=0)  # of each image: other captions, and its own captions' pairs
    both[:12] += t
    assert counts.squares[2, i] == (both * both).sum() - others.sum()
    own = np.arange(60), made[0].image_of_text
  assert counts.own[200] == (z[own] >= fitting.counting.LEVELS[200]).sum()
  assert (counts.positives, counts.images, counts.queries) == (right.sum(), 40, 60)


def test_round_trip(vague_and_precise):
  found, (scores, _, queries) = vague_and_precise
  again = Calibrator.from_dict(json.loads(json.dumps(found.to_dict())))
  np.testing.assert_array_equal(again.logit(scores, queries), found.logit(scores, queries))


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda f: f["curves"][0]["logit"].reverse(), "does not rise"),
    (lambda f: f["curves"][0]["score"].__setitem__(1, f["curves"][0]["score"][0]), "does not rise"),
    (lambda f: f["curves"][0]["score"].pop(), "differ in length"),
    (lambda f: f["curves"].pop(), "groups"),
    (lambda f: f["cuts"].append(0.0), "groups"),
  ],
)
def test_damaged_curves_are_refused(vague_and_precise, damage, message):
  fields = json.loads(json.dumps(vague_and_precise[0].to_dict()))
  damage(fields)
  with pytest.raises(ValueError, match=message):
    Calibrator.from_dict(fields)
