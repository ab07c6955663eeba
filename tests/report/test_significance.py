"""Paired tests over queries: by hand, against brute force, and under the null hypothesis."""

import itertools
import types

import numpy as np
import pytest
from scipy import stats

from xe_retrieval.report import significance


def run(ranks, image=None):
  curves = {"query_ranks": np.array(ranks)}
  if image is not None:
    curves["query_image"] = np.array(image)
  return types.SimpleNamespace(curves=curves)


@pytest.mark.parametrize(
  ("values", "p"),
  [
    ([0, 0, 0], 1),
    ([1, 1, 1, 1, 1, -1, 0], 14 / 64),  # McNemar, 5 against 1: 2·(1 + 6) of 2⁶
    ([3, 3, 3, 3, 3, -3], 14 / 64),  # of any scale
    ([2, 1], 2 / 4),  # sums 3, 1, −1, −3
    ([2, -1], 1),
    ([4, 2, 1, 1], 2 / 16),
  ],
)
def test_sign_flips_by_hand(values, p):
  assert significance.sign_flip(np.array(values)) == pytest.approx(p, abs=1e-12)


def test_sign_flips_against_every_choice_of_signs():
  random = np.random.default_rng(0)
  signs = np.array(list(itertools.product((-1, 1), repeat=11)))
  for _ in range(20):
    values = random.integers(-6, 8, 11)
    sums = np.abs(signs @ np.abs(values))
    expected = np.mean(sums >= abs(values.sum()))
    assert significance.sign_flip(values) == pytest.approx(expected, abs=1e-12)


def test_sign_flips_of_many_values_are_nearly_normal():
  values = np.random.default_rng(0).integers(-5, 6, 20_000)
  values[:350] = 2
  z = (abs(values.sum()) - 0.5) / np.sqrt((values**2).sum())
  assert significance.sign_flip(values) == pytest.approx(2 * stats.norm.sf(z), rel=0.01)


def test_holm_by_hand():
  assert significance.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
  assert significance.holm([0.5, 0.02]) == pytest.approx([0.5, 0.04])
  assert significance.holm([0.9, 0.6]) == pytest.approx([1, 1])


def test_differences_are_means_over_seeds_and_sums_over_captions_of_an_image():
  a = [run([0, 0, 5, 1])]
  b = [run([0, 1, 0, 1]), run([1, 1, 0, 0])]
  assert significance.differences(a, b).tolist() == [1, 2, -2, -1]  # times 1 · 2 seeds
  a = [run([0, 0, 5, 1], image=[0, 0, 1, 1])]
  assert significance.differences(a, b).tolist() == [3, -3]


def test_pairs_of_losses_are_corrected_together():
  good, bad = [0] * 10, [0] + [1] * 9  # 9 discordant queries, all one way: p = 2/2⁹
  p = significance.paired({"a": [run(good)], "b": [run(bad)], "c": [run(good)]})
  assert p["a", "b"] == p["b", "a"] == pytest.approx(3 * 2 / 2**9)
  assert p["b", "c"] == pytest.approx(3 * 2 / 2**9)
  assert p["a", "c"] == 1
  without = types.SimpleNamespace(curves={})
  assert significance.paired({"a": [run(good)], "b": [without]}) == {}


def test_captions_of_one_image_do_not_feign_certainty():
  """Equal models whose five captions of an image share their luck: 5 % of p lie below 5 %."""
  random = np.random.default_rng(0)
  image = np.repeat(np.arange(60), 5)
  share = {True: 0, False: 0}
  for _ in range(400):
    a, b = (np.repeat(random.integers(0, 2, 60), 5) for _ in range(2))
    for grouped in share:
      found = significance.differences([run(a, image if grouped else None)], [run(b)])
      share[grouped] += (significance.sign_flip(found) < 0.05) / 400
  assert share[True] <= 0.07
  assert share[False] > 0.2


def test_seeds_without_any_spread():
  assert significance.over_seeds([1, 1], [2, 2]) == 0
  assert significance.over_seeds([1, 1], [1, 1]) == 1
  assert significance.over_seeds([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
