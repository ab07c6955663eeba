"""Tables and plots of promises, probabilities and sources of relevance, from made-up figures."""

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from xe_retrieval.evaluation import relevance
from xe_retrieval.report import html_tables, plots, terminal


def promise(target, guarantee, threshold, kept, images=100, relevance="pairing"):
  row = {"relevance": relevance, "target": target, "gallery": images, "guarantee": guarantee}
  bound, returned = (None, 0.0) if threshold is None else (target - 0.03, 0.8)
  return row | {"threshold": threshold, "kept": kept, "lower_bound": bound, "returned": returned}


PROMISES = [
  promise(0.5, False, -1.0, 0.48),
  promise(0.5, True, -0.5, 0.45),
  promise(0.9, False, 3.0, None),
  promise(0.9, True, None, None),
  promise(0.5, False, -1.0, 0.52, images=700),
  promise(0.5, True, -0.5, 0.5, images=700),
]
SIDE = {"recall@1": 40.0}


def shown(seen=False):
  reliability = [[0.1, 0.15, 60], [0.5, 0.4, 30], [0.9, 1.0, 9]]
  found = {"ece": 0.06, "brier": 0.1, "reliability": reliability}
  galleries = [{"images": 100, "relevance": {"truth": found, "pairing": found | {"ece": 0.01}}}]
  on = "d validation (200 captions × 100 images)"
  return {"seen": seen, "relevance": "truth", "calibrated_on": on, "galleries": galleries}


def test_promises_table():
  table = html_tables.promises({"promises": PROMISES, "probabilities": shown()})
  assert table.groups == [("", 3), ("Without guarantee", 3), ("With guarantee", 3)]
  assert [[str(cell) for cell in row] for row in table.rows] == [
    ["pairing", "100", "50", "48.0", "47.0", "80.0", "45.0", "47.0", "80.0"],
    ["pairing", "100", "90", "nothing returned", "87.0", "80.0", "cannot be promised", "–", "–"],
    ["pairing", "700", "50", "52.0", "47.0", "80.0", "50.0", "47.0", "80.0"],
  ]
  marks = [[getattr(row[i], "mark", "") for i in (3, 6)] for row in table.rows]
  assert marks == [["", "broken"], ["", ""], ["", ""]]  # only a guarantee can be broken
  assert "chosen on d validation" in table.text and "90 % confident" in table.text


def test_calibration_table():
  found = {"opis": 0.02, "opis_strict": None, "ap_global": 0.3, "ap_per_query": 0.6}
  metrics = {"images": 100, "calibration": found, "probabilities": shown()}
  table = html_tables.calibration(metrics)
  assert [[str(cell) for cell in row] for row in table.rows] == [
    ["truth", "100", "0.0600", "0.1000", "", "", "", "", ""],
    ["pairing", "100", "0.0100", "0.1000", "0.0200", "–", "30.00", "60.00", "0.500"],
  ]
  assert table.text.startswith("Calibrated on d validation (200 captions × 100 images).")
  assert (
    "these very pairs" in html_tables.calibration(metrics | {"probabilities": shown(True)}).text
  )
  table = html_tables.calibration({"images": 100, "calibration": found})
  assert [str(cell) for cell in table.rows[0][:5]] == ["pairing", "100", "–", "–", "0.0200"]
  assert "not calibrated" in table.text


@pytest.mark.parametrize("found", [{}, {"ap_global": 0.0, "ap_per_query": 0.0}, {"ap_global": 0.5}])
def test_ratio_of_average_precisions_that_does_not_exist(found):
  assert html_tables.ap_ratio(found) is None


def test_relevance_table():
  truth = {"pr_auc": 70.0, "map_at_r": 55.0, "r_precision": 60.0}
  truth |= {"queries": 200, "relevant_per_query": 8.54}
  metrics = {"queries": 200, "pr_auc": 30.0, "text_to_image": SIDE, "relevance": {"truth": truth}}
  assert [[str(cell) for cell in row] for row in html_tables.relevance(metrics).rows] == [
    ["truth: the caption is true of the image", "8.5", "200", "70.00", "55.00", "60.00"],
    ["pairing: the caption was written for the image", "1.0", "200", "30.00", "40.00", "40.00"],
  ]


def test_promises_plot_shows_what_was_kept_above_what_was_promised():
  left, right = plots.promises(PROMISES).axes
  assert [axes.get_title() for axes in (left, right)] == ["Without guarantee", "With guarantee"]
  for axes, kept in ((left, {"100": [48], "700": [52]}), (right, {"100": [45], "700": [50]})):
    dots = [c for c in axes.collections if isinstance(c, PathCollection)]
    drawn = {c.get_label(): c.get_offsets() for c in dots if "images" in c.get_label()}
    assert {name.split()[1]: list(xy[:, 1]) for name, xy in drawn.items()} == kept
    assert all(abs(x) < 0.45 for xy in drawn.values() for x in xy[:, 0])  # over its target's line
    assert [list(line.get_ydata()) for line in axes.lines] == [[50, 50], [90, 90]]
    bounds = [c.get_offsets()[:, 1] for c in dots if "images" not in c.get_label()]
    np.testing.assert_allclose(np.concatenate(bounds), [47, 47])
  assert [text.get_text() for text in left.get_xticklabels()] == ["50", "90"]


def test_reliability_plot_leaves_out_bins_with_few_results():
  (axes,) = plots.reliability(shown()).axes
  ideal, truth, pairing = axes.lines
  assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [0, 100]
  assert truth.get_xydata() == pytest.approx(np.array([[10, 15], [50, 40]]))
  assert [line.get_label() for line in (truth, pairing)] == ["truth", "pairing"]


def test_every_source_of_relevance_is_drawn():
  names, judged = list(relevance.MEANING), shown()
  (gallery,) = judged["galleries"]
  gallery["relevance"] = dict.fromkeys(names, gallery["relevance"]["truth"])
  (axes,) = plots.reliability(judged).axes
  assert [line.get_label() for line in axes.lines] == ["ideal", *names]
  assert len({line.get_color() for line in axes.lines}) == 1 + len(names)
  left, _ = plots.promises([row | {"relevance": n} for n in names for row in PROMISES]).axes
  assert all(any(n in dots.get_label() for dots in left.collections) for n in names)


def test_precision_recall_plot_shows_every_source():
  line = {"recall": np.array([0, 1.0]), "precision": np.array([1, 0.5])}
  curves = {
    prefix + key: x for prefix in ("", "captions_", "distractors_") for key, x in line.items()
  }
  (axes,) = plots.precision_recall([("", curves)]).axes
  assert [x.get_label() for x in axes.lines] == ["pairing", "captions", "pairing, with distractors"]
  (axes,) = plots.precision_recall([("a", curves), ("b", curves)]).axes
  assert [x.get_label() for x in axes.lines] == ["a", "b"]


def test_a_table_for_the_terminal():
  cell = html_tables.Number
  rows = [["a", cell(1.5, 1, mark="best"), "2 of 3"], ["long name", cell(12, 1, mark="noise"), "–"]]
  table = html_tables.Table("", "", "", ["Loss", "R@1", "Kept"], rows)
  assert terminal.table(table).splitlines() == [
    "Loss        R@1    Kept ",
    "────────────────────────",
    "a           1.5*  2 of 3",
    "long name  12.0≈       –",
    "* best   ≈ within noise of the best",
  ]
