"""Human judgements: both file formats, and agreement worked out by hand."""

import numpy as np
import pytest
from sklearn import metrics

from xe_retrieval.evaluation import judgements
from xe_retrieval.evaluation.embedded import Images, Pairs


def test_experts(tmp_path):
  path = tmp_path / "experts.txt"
  path.write_text(
    "a.jpg\tb.jpg#0\t1\t1\t2\nb.jpg\ta.jpg#0\t4\t3\t2\nc.jpg\ta.jpg#0\t2\t1\t1\n"
    "a.jpg\ta.jpg#0\t4\t4\t4\n"  # its own caption: left out
    "z.jpg\ta.jpg#0\t1\t1\t1\n"  # not in the data set
  )
  read = judgements.read(path)
  assert read.relevant.tolist() == [False, True, False, True, False]
  found = judgements.agreement(read, _pairs())
  assert found["pairs"] == 3
  assert found["own_captions_left_out"] == 1
  assert found["not_in_data_set"] == 1
  assert found["ratings"] == 9
  # Scores 0.0 (a with b's caption), 0.8 (b with a's), 0.6 (c with a's); ratings below each:
  # [1 1 2], [4 3 2], [2 1 1]. Pairs of different score: b>c>a.
  # b over c and b over a: 8 of 9 concordant, one tie (2, 2); c over a: 2 up, 2 down, 5 ties.
  concordant, discordant = 8 + 8 + 2, 2
  assert found["kendall_tau_c"] == pytest.approx(
    100 * 2 * 3 * (concordant - discordant) / (81 * (3 - 1)), abs=1e-9
  )
  assert found["pr_auc"] == 100


def test_crowd(tmp_path):
  path = tmp_path / "crowd.txt"
  path.write_text(
    "a.jpg\tb.jpg#0\t0.0\t0\t3\nb.jpg\ta.jpg#0\t0.3333\t1\t2\nc.jpg\ta.jpg#0\t1.0\t3\t0\n"
    "c.jpg\tb.jpg#0\t0.5\t2\t2\n"
  )
  read = judgements.read(path)
  assert read.relevant.tolist() == [False, False, True, False]
  found = judgements.agreement(read, _pairs())
  scores = [0.0, 0.8, 0.6, 0.8]
  assert found["pr_auc"] == pytest.approx(
    100 * metrics.average_precision_score(read.relevant, np.float32(scores))
  )
  assert found["ratings"] == 4


def test_nothing_to_correlate_is_none(tmp_path):
  path = tmp_path / "same.txt"
  path.write_text("b.jpg\ta.jpg#0\t1\t1\t1\nc.jpg\ta.jpg#0\t1\t1\t1\n")
  found = judgements.agreement(judgements.read(path), _pairs())
  assert (found["kendall_tau_c"], found["spearman"], found["pr_auc"]) == (None, None, None)


@pytest.mark.parametrize(
  "line", ["a.jpg\tb#0\t1\t2", "a\tb\t5\t1\t1", "a\tb\t0.9\t1\t3", "a b 1 1 1"]
)
def test_a_wrong_line_is_named(tmp_path, line):
  path = tmp_path / "wrong.txt"
  path.write_text("a.jpg\tb.jpg#0\t1\t1\t2\n" + line + "\n")
  with pytest.raises(ValueError, match="wrong.txt:2: expected image, caption_id"):
    judgements.read(path)


def test_names_that_do_not_meet(tmp_path):
  path = tmp_path / "other.txt"
  path.write_text("x.jpg\ty.jpg#0\t1\t1\t2\n")
  with pytest.raises(ValueError, match="of 1 judged pairs, 0 are in the data set"):
    judgements.agreement(judgements.read(path), _pairs())


def _pairs():
  text = np.float32([[1, 0], [0, 1]])  # a.jpg#0, b.jpg#0
  image = np.float32([[1, 0], [0.8, 0.6], [0.6, 0.8]])  # a, b, c
  images = Images(image, names=["a.jpg", "b.jpg", "c.jpg"])
  return Pairs(text, images, np.array([0, 1]), ["", ""], lambda m: b"", ["a.jpg#0", "b.jpg#0"])
