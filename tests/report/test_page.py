"""The report: self-contained, escaped, with the right images, marks and numbers."""

import base64
import csv
import html.parser
import io
import json
import re
import types

import numpy as np
import pytest
from PIL import Image

from xe_retrieval.calibration import artifact
from xe_retrieval.calibration import run as runs
from xe_retrieval.evaluation import figures
from xe_retrieval.evaluation import relevance as relevances
from xe_retrieval.evaluation.embedded import Images, Pairs
from xe_retrieval.report import gallery, page

NASTY = "<script>alert('x')</script> & \"quotes\" {{ 7 * 7 }}"
CONFIG = {"loss": "cross_example_softmax", "seed": 0}
DISTRACTORS = [Images(np.random.default_rng(1).standard_normal((30, 16)).astype(np.float32) / 4)]


@pytest.fixture(scope="module")
def pairs():
  return _pairs(seed=0)


@pytest.fixture(scope="module")
def sources(pairs):
  return _sources(pairs)


@pytest.fixture(scope="module")
def calibration():
  return _calibration(_pairs(seed=2))


@pytest.fixture(scope="module")
def written(pairs, sources, calibration, tmp_path_factory):
  out = tmp_path_factory.mktemp("report")
  found = figures.evaluate(pairs, DISTRACTORS, sources)
  found.metrics.update(dataset="conceptual_captions", training_pairs=2_000_000)
  _judge(calibration, pairs, sources, found.metrics, seen=False)
  path = page.write(out, "<b>title</b>", CONFIG, 600, found, pairs, sources, calibration)
  return path, found, _Page(path.read_text())


def test_needs_no_network_and_runs_nothing(written):
  path, _, shown = written
  assert not shown.tags & {"script", "iframe", "object", "embed", "link", "base", "form"}
  assert shown.handlers == []
  for name, value in shown.addresses:
    if name == "src":
      assert value.startswith("data:image/")
    elif not value.startswith(("#", "data:image/")):  # within an SVG; else a file beside the page
      assert (path.parent / value).exists(), value[:80]
  source = path.read_text()
  assert "@import" not in source
  assert all(target.startswith("#") for target in re.findall(r"url\([\"']?([^)]*)", source))


def test_says_how_many_pairs_it_was_trained_on(written):
  text = written[2].text
  assert "· trained on 2,000,000 pairs" in text
  assert "This model was trained on 2,000,000 pairs. The paper: 3,318,333 training" in text


def test_captions_are_escaped(written):
  path, _, shown = written
  assert NASTY in shown.text  # shown as it is written
  assert "<script" not in path.read_text()
  assert "<b>title</b>" in shown.text


def test_gallery_shows_the_top_images_of_each_query(written, pairs, calibration):
  shown = written[2]
  assert len(shown.queries) > 8
  for q, results in shown.queries:
    scores = pairs.image @ pairs.text[q]
    expected = list(np.argsort(-scores)[:6])
    if pairs.image_of_text[q] not in expected:
      expected.append(pairs.image_of_text[q])  # the right image comes last
    assert [one["image"] for one in results] == expected
    probable = _probability(calibration, scores)
    assert [one["score"] for one in results] == [f"{100 * probable[m]:.0f} %" for m in expected]


def test_marks_the_truth_and_the_threshold(written, pairs, calibration):
  relevant, marks = _relevant(pairs), set()
  for q, results in written[2].queries:
    probable = _probability(calibration, pairs.image @ pairs.text[q])
    for one in results:
      m, right = one["image"], one["image"] == pairs.image_of_text[q]
      assert one["above"] == (probable[m] >= 0.5)
      assert one["mark"] == ("check" if right else "check also" if relevant[q, m] else None)
      marks.add((one["above"], one["mark"]))
  assert {(True, "check"), (True, "check also"), (False, None)} <= marks
  assert "at least 50 % probable that the caption is true of the image" in written[2].text
  assert "another image; the caption is true of the image" in written[2].text


def test_without_calibration_cosines_are_shown(pairs, tmp_path):
  found = figures.evaluate(pairs)
  path = page.write(tmp_path, "", CONFIG, None, found, pairs, relevances.sources(pairs))
  shown, best = _Page(path.read_text()), found.metrics["calibration"]["best_f1"]["threshold"]
  for q, results in shown.queries:
    for one in results:
      score = pairs.image[one["image"]] @ pairs.text[q]
      assert one["score"] == f"{score:.2f}"
      assert one["above"] == (score >= best)
      assert one["mark"] == ("check" if one["image"] == pairs.image_of_text[q] else None)
  assert f"cosine at least {best:.2f}" in shown.text
  assert "This model is not calibrated" in shown.text and "Promises" not in shown.text
  names = {file.name for file in tmp_path.iterdir()}
  assert "calibration.csv" in names
  assert not names & {"promises.csv", "promises.png", "reliability.png", "relevance.csv"}


def test_promises_are_not_judged_on_the_pairs_they_were_chosen_on(pairs, sources, tmp_path):
  found, calibration = figures.evaluate(pairs, (), sources), _calibration(pairs)
  _judge(calibration, pairs, sources, found.metrics, seen=True)
  path = page.write(tmp_path, "", CONFIG, 1, found, pairs, sources, calibration)
  assert "which are these very pairs" in _Page(path.read_text()).text
  names = {file.name for file in tmp_path.iterdir()}
  assert {"reliability.png", "relevance.csv"} <= names
  assert not names & {"promises.csv", "promises.png"}


def test_confidently_wrong_are_only_images_not_known_to_be_relevant(pairs):
  found = figures.evaluate(pairs)
  wrong = np.flatnonzero(found.ranks > 0)
  first = (pairs.text @ pairs.image.T).argmax(axis=1)
  asked, unknown = wrong[::2], wrong[1::2]  # people were asked about half of them
  judged = {int(q): np.arange(len(pairs.image)) == first[q] for q in asked}

  def matrix(rows, part):
    return np.stack([judged[int(q)] for q in rows])  # knows no others

  people = relevances.Relevance("people", matrix, asked, 1)
  shown = gallery.shown(pairs, best_f1=-1.0)  # all are confident
  parts = {s["title"]: s for s in gallery.sections(pairs, found, people, shown)}
  captions = {query["caption"] for query in parts["Confidently wrong"]["queries"]}
  assert captions and captions <= {pairs.captions[q] for q in unknown}
  assert "left out where people find that" in parts["Confidently wrong"]["text"]
  assert "Nothing relevant" not in parts
  marked = {
    query["caption"]
    for part in parts.values()
    for query in part["queries"]
    if any(one["also_relevant"] for one in query["results"])
  }
  shown_queries = {query["caption"] for part in parts.values() for query in part["queries"]}
  assert marked == shown_queries & {pairs.captions[q] for q in asked}


def test_no_caption_is_shown_twice(written):
  queries = [q for q, _ in written[2].queries]
  assert len(queries) > 8 and len(set(queries)) == len(queries)


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
  rows = list(csv.DictReader((path.parent / "promises.csv").open()))
  asked = [(r["Relevance"], int(r["Images"]), float(r["Promised"])) for r in rows]
  targets = (30, 50, 70, 90)
  assert asked == [(s, n, t) for n in (40, 70) for s in ("truth", "pairing") for t in targets]
  kept = {row["target"]: row["kept"] for row in found.metrics["promises"][:8:2]}
  assert float(rows[1]["Kept Without guarantee"]) == 100 * kept[0.5]
  truth, pairing = csv.DictReader((path.parent / "relevance.csv").open())
  assert float(truth["mAP@R"]) == found.metrics["relevance"]["truth"]["map_at_r"]
  assert float(pairing["PR-AUC"]) == found.metrics["pr_auc"]
  for name in ("precision_recall", "score_distributions", "recall", "reliability", "promises"):
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
  assert metrics["relevance"]["truth"]["pr_auc"] > metrics["pr_auc"]
  assert metrics["distractors"]["pr_auc"] < metrics["pr_auc"]
  json.dumps(metrics, allow_nan=False)


def _pairs(seed):
  random = np.random.default_rng(seed)
  image = random.standard_normal((40, 16))
  own = np.repeat(np.arange(40), 2)
  text = image[own] + 1.4 * random.standard_normal((80, 16))
  text, image = (
    (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (text, image)
  )
  captions = [f"{NASTY} {q}" for q in range(80)]
  return Pairs(text, Images(image), own, captions, _encoded)


def _relevant(pairs):
  own = pairs.image_of_text[:, None] == np.arange(len(pairs.image))
  return (pairs.text @ pairs.image.T > 0.5) | own


def _sources(pairs):
  """Truth, by which no distractor is relevant, and the pairing."""
  parts = [_relevant(pairs), np.zeros((80, 30), bool)]
  matrix = lambda rows, part: parts[part][rows]  # noqa: E731
  truth = relevances.Relevance("truth", matrix, np.arange(80), len(parts))
  return [truth, *relevances.sources(pairs, DISTRACTORS)]


def _calibration(pairs):
  about = {"dataset": "d", "split": "validation", "queries": 80, "images": 40}
  return artifact.make(pairs, [pairs.images], _sources(pairs), None, about)


def _judge(calibration, pairs, sources, metrics, seen):
  """Adds to the metrics as evaluation does."""
  run = types.SimpleNamespace(distractors=DISTRACTORS)
  runs.Run.judge(run, calibration, pairs, sources, metrics, seen)


def _probability(calibration, scores):
  """In a collection as large as that of the calibration, by its only curve: no bank."""
  (curve,) = calibration.best.calibrator.curves
  slope = (np.diff(curve[1]) / np.diff(curve[0]))[[0, -1]]
  odds = np.interp(scores, *curve)
  odds += slope[0] * np.minimum(scores - curve[0][0], 0)
  odds += slope[1] * np.maximum(scores - curve[0][-1], 0)
  return 1 / (1 + np.exp(-odds))


def _encoded(m):
  """Image m as a PNG of one grey level, from which the gallery's thumbnails are recognised."""
  out = io.BytesIO()
  Image.fromarray(np.full((300, 400, 3), 5 * m, np.uint8)).save(out, "PNG")
  return out.getvalue()


def _recognise(data_uri):
  image = Image.open(io.BytesIO(base64.b64decode(data_uri.partition(",")[2])))
  assert max(image.size) == 160
  return round(np.asarray(image).mean() / 5)


class _Page(html.parser.HTMLParser):
  """Text, addresses, tags, event handlers, and the gallery as [(query, results)]."""

  def __init__(self, source):
    super().__init__()
    self.text, self.addresses, self.tags, self.handlers, self.queries = "", [], set(), [], []
    self._inside = None
    self.feed(source)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.addresses += [(n[-4:], v) for n, v in attrs if n in ("src", "href", "xlink:href")]
    self.handlers += [n for n, _ in attrs if n.startswith("on")]
    attrs = dict(attrs)
    kind = attrs.get("class") or ""
    self._inside = kind if kind == "caption" else tag if tag == "span" else None
    if kind.split()[:1] == ["result"]:
      result = {"above": "above" in kind.split(), "mark": None}
      self.queries[-1][1].append(result)
    elif tag == "img":
      self.queries[-1][1][-1]["image"] = _recognise(attrs["src"])
    elif tag == "i" and self.queries and kind.startswith("check"):
      self.queries[-1][1][-1]["mark"] = kind

  def handle_data(self, data):
    self.text += data
    if self._inside == "caption":
      self.queries.append((int(re.search(r"(\d+)”", data)[1]), []))
    elif self._inside == "span" and self.queries and self.queries[-1][1]:
      self.queries[-1][1][-1].setdefault("score", data)
    self._inside = None
