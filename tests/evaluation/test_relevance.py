"""Sources of relevance on a data set of three images, worked out by hand."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from xe_retrieval.data import shapes
from xe_retrieval.evaluation import relevance
from xe_retrieval.evaluation.embedded import Images, Pairs

# Captions of three images; "two dogs" and "a pair of dogs" say the same, as do their prefixes.
CAPTIONS = [["a dog", "two dogs"], ["a cat"], ["a pair of dogs"]]
SAYS = {"a dog": 0, "two dogs": 1, "a pair of dogs": 1, "a cat": 2, "cats": 2, "a car": 3}


def encode(captions):
  return np.eye(4, dtype=np.float32)[[SAYS[c] for c in captions]]


def pairs(**known):
  flat = [c for captions in CAPTIONS for c in captions]
  ids = ["a#0", "a#1", "b#0", "c#0"]
  vectors = np.float32([[1, 0], [0.8, 0.6], [0, 1]])
  text = np.float32([[1, 0], [0.6, 0.8], [0, 1], [0.8, 0.6]])
  images = Images(vectors, **known)
  return Pairs(text, images, np.array([0, 0, 1, 2]), flat, lambda m: b"", ids)


def whole(source, part=0):
  return source.matrix(source.queries, part).astype(int).tolist()


PAIRING = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_pairing_knows_every_image():
  (source,) = relevance.sources(pairs(), [Images(np.ones((2, 2), np.float32))])
  assert (source.name, source.parts) == ("pairing", 2)
  assert whole(source) == PAIRING
  assert whole(source, 1) == [[0, 0]] * 4
  assert source.matrix(np.array([3, 0]), 0).astype(int).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_captions_that_say_the_same():
  far = Images(np.ones((3, 2), np.float32), [["a car"], ["a car", "cats"], ["two dogs"]])
  sources = relevance.sources(pairs(captions=CAPTIONS), [far], same_captions=encode)
  assert [s.name for s in sources] == ["captions", "pairing"]
  source = sources[0]
  assert source.parts == 2
  assert whole(source) == [[1, 0, 0], [1, 0, 1], [0, 1, 0], [1, 0, 1]]
  assert whole(source, 1) == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
  # Without captions of the distractors, only the first part is known.
  bare = Images(np.ones((3, 2), np.float32))
  sources = relevance.sources(pairs(captions=CAPTIONS), [bare, far], same_captions=encode)
  assert [s.parts for s in sources] == [1, 3]
  assert [s.name for s in relevance.sources(pairs(captions=CAPTIONS))] == ["pairing"]


def test_own_image_is_relevant_whatever_the_encoder_says():
  captions = [["a dog"], ["a cat"], ["a car"]]
  (source, _) = relevance.sources(pairs(captions=captions), same_captions=encode)
  assert whole(source) == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_truth_of_drawn_scenes():
  scenes = np.stack([shapes.scene(0, "test", i) for i in range(6)])
  captions = [shapes.caption(0, "test", i) for i in range(3)] + ["some shapes"]
  data = pairs(scenes=scenes[:3])
  data = Pairs(data.text, data.images, data.image_of_text, captions, data.encoded)
  vectors = np.ones((3, 2), np.float32)
  source = relevance.sources(data, [Images(vectors, scenes=scenes[3:]), Images(vectors)])[0]
  assert (source.name, source.parts) == ("truth", 2)
  np.testing.assert_array_equal(
    np.concatenate([source.matrix(source.queries, part) for part in (0, 1)], axis=1),
    shapes.relevance(captions, scenes),
  )
  assert source.matrix(np.array([3]), 1).all()


def test_people_judge_some_queries():
  judgements = {"a#1": {"a.jpg", "c.jpg"}, "c#0": {"z.jpg"}, "b#0": set(), "x#0": {"a.jpg"}}
  data = pairs(names=["a.jpg", "b.jpg", "c.jpg"])
  source = relevance.sources(data, [Images(data.image)], judgements)[0]
  assert (source.name, source.parts) == ("people", 1)
  assert source.queries.tolist() == [1]
  assert whole(source) == [[1, 0, 1]]
  with pytest.raises(ValueError, match="none of the judged captions .* like 'a#0' and 'a.jpg'"):
    relevance.sources(data, judgements={"x#0": {"a.jpg"}})
  with pytest.raises(ValueError, match="image names and caption ids"):
    relevance.sources(pairs(), judgements=judgements)


def test_best_source_comes_first():
  data = pairs(
    captions=CAPTIONS,
    names=["a.jpg", "b.jpg", "c.jpg"],
    scenes=np.stack([shapes.scene(0, "test", i) for i in range(3)]),
  )
  found = [s.name for s in relevance.sources(data, (), {"a#0": {"a.jpg"}}, encode)]
  assert found == ["truth", "people", "captions", "pairing"]
  assert list(relevance.MEANING) == [*found, "words"]  # which is of other queries


def test_scores_and_relevance_side_by_side():
  data = pairs()
  far = Images(np.float32([[0, -1]]))
  (source,) = relevance.sources(data, [far])
  ((rows, scores, right),) = relevance.scored(data, [data.images, far], source)
  assert rows.tolist() == [0, 1, 2, 3]
  np.testing.assert_allclose(scores[1], [0.6, 0.96, 0.8, -0.8], rtol=1e-6)
  assert right.astype(int).tolist() == [row + [0] for row in PAIRING]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("graded", [False, True])
def test_judgements_are_read(tmp_path, suffix, graded):
  rows = [("a#0", "a.jpg", 4), ("a#0", "b, c.jpg", 3), ("b#0", "a.jpg", 2.5), ("7", "8", "")]
  columns = ("caption_id", "image", "grade")[: 2 + graded]
  path = tmp_path / f"people.{suffix}"
  if suffix == "jsonl":
    lines = [json.dumps(dict(zip(columns, row, strict=False))) for row in rows]
  else:
    comma = {"csv": ",", "tsv": "\t"}[suffix]
    quoted = [[f'"{x}"' for x in row[: len(columns)]] for row in rows]
    lines = [comma.join(columns), *map(comma.join, quoted)]
  path.write_text("\n".join(lines) + "\n")
  found = relevance.read_judgements(str(path))
  assert found == {
    "a#0": {"a.jpg", "b, c.jpg"},
    "b#0": set() if graded else {"a.jpg"},
    "7": {"8"},
  }


@pytest.mark.parametrize(
  ("name", "text", "line"),
  [
    ("a.csv", "caption_id,image,grade\na,b,3\na,c,good\n", 3),
    ("a.tsv", "caption\timage\na\tb\n", 2),
    ("a.jsonl", '{"caption_id": 1, "image": 2}\n{"caption_id": 1}\n', 2),
    ("a.jsonl", '{"caption_id": 1, "image": 2}\n\nno json\n', 3),
    ("a.csv", "caption_id,image\na,b\na\n", 3),
  ],
)
def test_a_wrong_line_is_named(tmp_path, name, text, line):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=rf"{name}:{line}: expected caption_id, image"):
    relevance.read_judgements(str(tmp_path / name))


def test_no_judgements(tmp_path):
  with pytest.raises(ValueError, match="there is no such file"):
    relevance.read_judgements(str(tmp_path / "none.csv"))
  (tmp_path / "empty.csv").write_text("caption_id,image\n")
  with pytest.raises(ValueError, match="holds no judgements"):
    relevance.read_judgements(str(tmp_path / "empty.csv"))


def test_eccv_caption_is_a_package_of_its_own(monkeypatch):
  monkeypatch.setitem(sys.modules, "eccv_caption", None)
  with pytest.raises(ValueError, match="pip install eccv_caption"):
    relevance.read_judgements("eccv")


@pytest.mark.skipif(not importlib.util.find_spec("eccv_caption"), reason="needs eccv_caption")
@pytest.mark.filterwarnings("ignore:failed to import")
def test_eccv_caption():
  found = relevance.read_judgements("eccv")
  assert len(found) == 1332
  assert np.mean([len(images) for images in found.values()]) == pytest.approx(8.47, abs=0.01)
  assert "000000445512.jpg" in found["552666"]
  assert len(relevance.read_judgements("cxc")) == 24_972
