"""The report: self-contained, escaped, and saying what was measured."""

import base64
import csv
import html.parser
import io
import json

import numpy as np
import pytest
from PIL import Image

from xe_retrieval.report import page
from xe_retrieval.retrieval import evaluation
from xe_retrieval.retrieval.pairs import Pairs

NASTY = "<script>alert('x')</script> & \"quotes\" {{ 7 * 7 }}"
CONFIG = {"loss": "cross_example_softmax", "seed": 0}


@pytest.fixture(scope="module")
def pairs():
  random = np.random.default_rng(0)
  image = random.standard_normal((40, 16))
  own = np.repeat(np.arange(40), 2)
  text = image[own] + 0.9 * random.standard_normal((80, 16))
  text, image = (
    (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (text, image)
  )
  captions = [f"{NASTY} {q}" for q in range(80)]
  relevant = (text @ image.T > 0.7) | (own[:, None] == np.arange(40))
  return Pairs(text, image, own, captions, _picture, lambda rows: relevant[rows])


@pytest.fixture(scope="module")
def written(pairs, tmp_path_factory):
  out = tmp_path_factory.mktemp("report")
  distractors = np.random.default_rng(1).standard_normal((30, 16)).astype(np.float32)
  found = evaluation.evaluate(pairs, distractors / 4)
  found.metrics.update(dataset="conceptual_captions", training_pairs=2_000_000)
  path = page.write(out, "<b>title</b>", CONFIG, 600, found, pairs)
  return path, found, _Page(path.read_text())


def test_needs_no_network_and_runs_nothing(written):
  _, _, shown = written
  assert shown.tags["script"] == 0
  for name, value in shown.addresses:
    if name == "src":
      assert value.startswith("data:image/")
    elif not value.startswith(("#", "data:image/")):  # within an SVG; else a file beside the page
      assert (written[0].parent / value).exists(), value[:80]


def test_says_how_many_pairs_it_was_trained_on(written):
  text = written[2].text
  assert "· trained on 2,000,000 pairs" in text
  assert "This model was trained on 2,000,000 pairs. The paper: 3,318,333 training" in text


def test_captions_are_escaped(written):
  path, _, shown = written
  assert NASTY in shown.text  # shown as it is written
  assert "<script" not in path.read_text()
  assert "<b>title</b>" in shown.text


def test_pictures_are_those_of_the_images(written):
  shown = written[2]
  pictures = [v for name, v in shown.addresses if name == "src" and "svg" not in v]
  gallery = [p for p in pictures if p.startswith("data:image/jpeg")]
  assert len(gallery) >= 20
  picture = Image.open(io.BytesIO(base64.b64decode(gallery[0].partition(",")[2])))
  assert max(picture.size) == 160


def test_marks_the_truth_and_the_threshold(written):
  path, found, shown = written
  threshold = found.metrics["calibration"]["best_f1"]["threshold"]
  results = path.read_text().split('<div class="result')[1:]
  results = [r for r in results if not r.startswith("s")]
  assert len(results) > 20
  for one in results:
    score = float(one.split("<span>")[1].split("<")[0])
    if abs(score - threshold) > 0.01:  # the page shows two digits
      assert one.startswith(" above") == (score > threshold)
  assert shown.checks > 0
  assert shown.tags["svg"] == 4


def test_no_caption_is_shown_twice(written):
  captions = written[0].read_text().split('<p class="caption">')[1:]
  captions = [one.split("<span>")[0] for one in captions]
  assert len(captions) > 8 and len(set(captions)) == len(captions)


def test_tables_and_plots_are_files_too(written):
  path, found, _ = written
  rows = list(csv.DictReader((path.parent / "headline.csv").open()))
  assert [row[""] for row in rows] == [
    "Text → image",
    "the paper",
    "Image → text",
    "Text → image, 30 more",
    "the paper",
  ]
  assert float(rows[0]["PR-AUC"]) == found.metrics["pr_auc"]
  assert (
    float(rows[0]["Recall@1 low"]) == found.metrics["intervals"]["text_to_image"]["recall@1"][0]
  )
  assert float(rows[1]["PR-AUC"]) == 20.12
  assert float(rows[4]["Recall@100"]) == 21.54
  best = found.metrics["calibration"]["best_f1"]
  *rows, last = csv.DictReader((path.parent / "thresholds.csv").open())
  assert [float(row["Precision asked for"]) for row in rows] == [50, 80, 90, 95]
  assert last["Precision asked for"] == f"best F1, {best['f1']:.1f}"
  assert float(last["Cosine at least"]) == best["threshold"]
  for name in ("precision_recall", "score_distributions", "recall", "reliability"):
    assert Image.open(path.parent / f"{name}.png").size[0] > 800
    assert (path.parent / f"{name}.svg").read_text().startswith("<?xml")


def test_figures_of_the_evaluation_agree_with_each_other(written, pairs):
  metrics = written[1].metrics
  assert (metrics["queries"], metrics["images"]) == (80, 40)
  scores = pairs.text @ pairs.image.T
  first = scores.argmax(axis=1) == pairs.image_of_text
  assert metrics["text_to_image"]["recall@1"] == pytest.approx(100 * first.mean())
  for name, value in metrics["text_to_image"].items():
    low, high = metrics["intervals"]["text_to_image"][name]
    assert low <= value <= high
  low, high = metrics["intervals"]["pr_auc"]
  assert low < metrics["pr_auc"] < high
  for row in written[1].thresholds:
    assert row["precision_interval"][0] <= row["precision"] <= row["precision_interval"][1]
    assert row["interval"][0] <= row["threshold"] <= row["interval"][1]
  assert metrics["true_relevance"]["pr_auc"] > metrics["pr_auc"]
  assert metrics["distractors"]["pr_auc"] < metrics["pr_auc"]
  json.dumps([metrics, written[1].thresholds], allow_nan=False)


def _picture(m):
  out = io.BytesIO()
  Image.fromarray(np.full((300, 400, 3), 5 * m, np.uint8)).save(out, "PNG")
  return out.getvalue()


class _Page(html.parser.HTMLParser):
  """What a browser would see: text, addresses, tags."""

  def __init__(self, source):
    super().__init__()
    self.text, self.addresses, self.checks = "", [], 0
    self.tags = {"script": 0, "svg": 0}
    self.feed(source)

  def handle_starttag(self, tag, attrs):
    self.tags[tag] = self.tags.get(tag, 0) + 1
    self.addresses += [(n[-4:], v) for n, v in attrs if n in ("src", "href", "xlink:href")]
    self.checks += ("class", "check") in attrs

  def handle_data(self, data):
    self.text += data
