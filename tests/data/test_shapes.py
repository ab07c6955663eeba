"""The embedded data set: deterministic, disjoint splits, captions with known relevance."""

import numpy as np
import pytest

from xe_retrieval.data import shapes


def scene(*objects):
  """("large", "blue", "circle", cell), … -> int8 [3, 4]."""
  out = np.full((3, 4), -1, np.int8)
  for row, (size, colour, shape, cell) in enumerate(objects):
    kind, hue = shapes.SHAPES.index(shape), list(shapes.COLOURS).index(colour)
    out[row] = (kind, hue, shapes.SIZES.index(size), cell)
  return out


TWO = scene(("small", "red", "circle", 0), ("large", "blue", "square", 5))
THREE = scene(
  ("small", "red", "circle", 1), ("small", "red", "circle", 4), ("large", "white", "star", 7)
)


def test_everything_is_a_function_of_seed_split_and_index():
  for index in range(20):
    np.testing.assert_array_equal(shapes.scene(3, "train", index), shapes.scene(3, "train", index))
    assert shapes.caption(3, "train", index) == shapes.caption(3, "train", index)
  assert any((shapes.scene(3, "train", i) != shapes.scene(4, "train", i)).any() for i in range(5))


def test_no_scene_is_in_two_splits():
  drawn = {s: {shapes.scene(0, s, i).tobytes() for i in range(400)} for s in shapes._SHARE}
  assert not drawn["train"] & drawn["test"]
  assert not drawn["train"] & drawn["validation"]
  assert not drawn["validation"] & drawn["test"]


def test_every_caption_is_true_of_its_own_scene():
  scenes = np.stack([shapes.scene(0, "test", i) for i in range(500)])
  captions = [shapes.caption(0, "test", i) for i in range(500)]
  truth = shapes.relevance(captions, scenes)
  assert truth.shape == (500, 500)
  assert truth.diagonal().all()
  assert 0.01 < truth.mean() < 0.5
  assert len({len(c.split()) for c in captions}) >= 8  # every level of detail


@pytest.mark.parametrize(
  ("caption", "two", "three"),
  [
    ("some shapes", True, True),
    ("two shapes", True, False),
    ("a red shape", True, True),
    ("a small shape", True, True),
    ("a star", False, True),
    ("a large blue square on the right", True, False),
    ("a large blue square on the left", False, False),
    ("a small red circle left of a large blue square", True, False),
    ("a large blue square right of a small red circle", True, False),
    ("a large blue square above a small red circle", False, False),
    ("a small red circle above a small red circle", False, True),
    ("a small red circle and a small red circle", False, True),
    ("a small red circle and a large blue square", True, False),
    ("a large white star, a small red circle and a small red circle", False, True),
  ],
)
def test_relevance(caption, two, three):
  assert shapes.relevance([caption], np.stack([TWO, THREE])).tolist() == [[two, three]]


def test_a_sentence_outside_the_grammar_is_refused():
  with pytest.raises(ValueError, match="two dogs"):
    shapes.relevance(["two dogs on a beach"], TWO[None])


def test_images_show_the_objects_in_their_places():
  image = shapes.render(TWO)
  assert image.shape == (64, 64, 3) and image.dtype == np.uint8
  np.testing.assert_array_equal(image[10, 10], shapes.COLOURS["red"])
  np.testing.assert_array_equal(image[32, 53], shapes.COLOURS["blue"])
  np.testing.assert_array_equal(image[60, 10], shapes.BACKGROUND)
