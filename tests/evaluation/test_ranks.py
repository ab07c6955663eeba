"""Streaming ranks against a stable sort of the whole score matrix."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from xe_retrieval.evaluation import pair_counts, ranks, score_tiles


def test_by_hand():
  # One caption per row, scores are the entries: the right image is 2nd, 1st and 3rd.
  text = np.array([[0.5, 0.9, 0.1], [0.2, 0.8, 0.3], [0.7, 0.6, 0.5]], np.float32)
  image = np.eye(3, dtype=np.float32)
  found = ranks.text_to_image(text, image, np.arange(3))
  assert found.dtype == np.int64
  assert found.tolist() == [1, 0, 2]
  # Down the columns: 0.5 < 0.7; 0.8 < 0.9; 0.5 is the best.
  assert ranks.image_to_text(text, image, np.arange(3)).tolist() == [1, 1, 0]
  assert ranks.recall_at(found, 1) == pytest.approx(100 / 3)
  assert ranks.median(found) == 2


@pytest.mark.parametrize("ties", [False, True])
def test_equal_to_stable_sort(ties):
  text, image, image_of_text, distractors = _data(700, 300, 150, ties)
  scores = text.astype(np.float64) @ np.concatenate([image, distractors]).T.astype(np.float64)
  expected = _sorted_position(scores, image_of_text)
  found = ranks.text_to_image(text, image, image_of_text, distractors)
  np.testing.assert_array_equal(found, expected)
  halves = [distractors[:60], distractors[60:]]
  np.testing.assert_array_equal(ranks.text_to_image(text, image, image_of_text, halves), expected)


@pytest.mark.parametrize("ties", [False, True])
def test_any_caption_of_the_image_counts(ties):
  text, image, image_of_text, _ = _data(700, 300, 1, ties)
  scores = image.astype(np.float64) @ text.T.astype(np.float64)
  order = np.argsort(-scores, axis=1, kind="stable")
  hits = image_of_text[order] == np.arange(len(image))[:, None]
  expected = hits.argmax(axis=1)[hits.any(axis=1)]  # images without a caption are left out
  np.testing.assert_array_equal(ranks.image_to_text(text, image, image_of_text), expected)


def test_tiles_and_their_edges(monkeypatch):
  text, image, image_of_text, distractors = _data(130, 257, 300, ties=True)
  expected = ranks.text_to_image(text, image, image_of_text, distractors)
  for queries, documents in ((1, 128), (128, 1), (7, 3), (129, 256)):
    monkeypatch.setattr(score_tiles, "QUERIES", queries)
    monkeypatch.setattr(score_tiles, "DOCUMENTS", documents)
    found = ranks.text_to_image(text, image, image_of_text, distractors)
    np.testing.assert_array_equal(found, expected)


def test_copies_of_an_image_tie_in_any_tile(monkeypatch):
  # The same row at other places of other tiles must have the same score to the last bit.
  rng = np.random.default_rng(0)
  text = rng.standard_normal((40, 100)).astype(np.float32)
  image = np.tile(rng.standard_normal((5, 100)).astype(np.float32), (60, 1))
  for documents in (7, 130, 16384):
    monkeypatch.setattr(score_tiles, "DOCUMENTS", documents)
    first = ranks.text_to_image(text, image, np.full(40, 2))
    last = ranks.text_to_image(text, image, np.full(40, 297))
    assert set(first) <= {0, 60, 120, 180, 240}
    np.testing.assert_array_equal(last - first, 59)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_on_devices(count, monkeypatch):
  monkeypatch.setattr(score_tiles, "QUERIES", 64)
  monkeypatch.setattr(score_tiles, "DOCUMENTS", 128)
  text, image, image_of_text, distractors = _data(100, 300, 1500, ties=True)
  expected = ranks.text_to_image(text, image, image_of_text, distractors)
  devices = jax.devices()[:count]
  assert len(devices) == count
  found = ranks.text_to_image(text, image, image_of_text, distractors, devices=devices)
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(
    ranks.image_to_text(text, image, image_of_text, devices=devices),
    ranks.image_to_text(text, image, image_of_text),
  )


@pytest.mark.parametrize("count", [1, 3])
def test_all_counts_on_devices_equal_those_of_numpy(count, monkeypatch):
  monkeypatch.setattr(score_tiles, "QUERIES", 20)
  monkeypatch.setattr(score_tiles, "DOCUMENTS", 64)
  rng = np.random.default_rng(3)
  # Whole numbers: their products are exact, so that every count is the same.
  text, image, far = (rng.integers(-3, 4, (n, 8)).astype(np.float32) for n in (50, 130, 90))
  own = rng.integers(0, 130, 50)
  found = []
  for devices in ([], jax.devices()[:count]):
    matches = pair_counts.Matches(text, image, own, devices)
    near = matches.count(levels=[-10, 0, 10])
    found.append((matches.own, near, near + matches.count([far], levels=[-10, 0, 10])))
  chex.assert_trees_all_equal(*((o, *map(dataclasses.astuple, both)) for o, *both in found))
  own_scores, near, every = found[0]
  scores = text @ np.concatenate([image, far]).T
  np.testing.assert_array_equal(own_scores, scores[np.arange(50), own])
  at = np.unique(own_scores)
  np.testing.assert_array_equal(near.returned, [(scores[:, :130] >= t).sum() for t in at])
  np.testing.assert_array_equal(every.returned, [(scores >= t).sum() for t in at])
  np.testing.assert_array_equal(every.counts[:, 1], (scores >= 0).sum(axis=1))
  np.testing.assert_array_equal(every.top, -np.sort(-scores, axis=1)[:, :100])
  assert every.documents == 220


def test_constant_scores_are_chance():
  text, image = np.ones((50, 4), np.float32), np.ones((50, 4), np.float32)
  found = ranks.text_to_image(text, image, np.arange(50))
  assert ranks.recall_at(found, 1) == 2
  assert ranks.median(found) == 25.5


def test_says_what_is_wrong():
  text, image, own, _ = _data(10, 5, 1, False)
  broken = text.copy()
  broken[3, 0] = np.nan  # NaN outscores nothing: without a check every rank would be 0
  with pytest.raises(ValueError, match="text holds NaN or infinity in 1 rows, the first is 3"):
    ranks.text_to_image(broken, image, own)
  with pytest.raises(ValueError, match=r"image_of_text must lie in \[0, 5\)"):
    ranks.text_to_image(text, image, own + 5)
  with pytest.raises(ValueError, match="image_of_text must be int .10."):
    ranks.text_to_image(text, image, own[:4])
  with pytest.raises(ValueError, match="distractors has width 3"):
    ranks.text_to_image(text, image, own, np.ones((4, 3), np.float32))


def _data(queries, images, distractors, ties):
  """Small integers have exact products in any order, and many that are equal."""
  rng = np.random.default_rng(queries + images)
  width = 6 if ties else 24
  size = 2 if ties else 40
  text, image, extra = (
    rng.integers(-size, size + 1, (n, width)).astype(np.float32)
    for n in (queries, images, distractors)
  )
  return text, image, rng.integers(0, images, queries), extra


def _sorted_position(scores, own):
  order = np.argsort(-scores, axis=1, kind="stable")
  return (order == own[:, None]).argmax(axis=1)
