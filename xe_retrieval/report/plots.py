"""The figures of report and comparison, drawn from the arrays of curves.npz.

Each takes runs as [(label, curves)]: one for a report, several to lay over each other. Runs with
the same label, such as seeds of one loss, share a colour.
"""

import io
import re

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib import ticker
from matplotlib.figure import Figure

BLUE, ORANGE = "#3d7fd9", "#e8862e"
COLOURS = (BLUE, ORANGE, "#2f9e77", "#c2559d", "#8a6fd1", "#b59a1d", "#5aa9c9", "#cf5b50")
COLOURS += ("#7d8794", "#8a5a33")
INK, FAINT = "#40464f", "#d9dde3"  # the page swaps these two for its own, light or dark


def precision_recall(runs):
  """Precision over recall of all pairs, as one global threshold falls."""
  figure, axes = _axes("Recall (%)", "Precision (%)")
  for label, colour, curves in _coloured(runs):
    many = len(runs) > 1
    _line(axes, curves, "recall", "precision", colour, label if many else "against the pairing")
    if not many and "true_recall" in curves:
      _line(axes, curves, "true_recall", "true_precision", COLOURS[2], "against what is true")
    if not many and "distractors_recall" in curves:
      names = ("distractors_recall", "distractors_precision")
      _line(axes, curves, *names, ORANGE, "among distractors", linestyle="--")
  axes.set(xlim=(0, 100), ylim=(0, 101))
  _legend(axes, "upper right")
  return figure


def recall(runs):
  """Recall@k over k, both directions."""
  figure, axes = _axes("k", "Queries answered within the first k (%)")
  shown = [
    ("text_to_image", "text → image", "-"),
    ("image_to_text", "image → text", ":"),
    ("distractors_text_to_image", "text → image, distractors", "--"),
  ]
  for label, colour, curves in _coloured(runs):
    for name, title, style in shown:
      if f"{name}_k" in curves and (len(runs) == 1 or name == "text_to_image"):
        text = label if len(runs) > 1 else title
        k, share = curves[f"{name}_k"], curves[f"{name}_recall"]
        axes.plot(k, share, style, color=colour, label=text)
  axes.set(xscale="log", xlim=(1, None), ylim=(0, 101))
  axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
  _legend(axes, "lower right")
  return figure


def score_distributions(runs):
  """The paper's plot: one line per query, neighbours over similarity, 5th and 95th percentile."""
  panels = list({label: curves for label, curves in reversed(runs)}.items())[::-1]
  columns = min(len(panels), 3)
  rows = -(-len(panels) // columns)
  figure = Figure((5.2, 3.9) if len(panels) == 1 else (10.6, 3.7 * rows))
  figure.set_layout_engine("constrained")
  grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  for n, (axes, (label, curves)) in enumerate(zip(grid, panels, strict=False)):
    first, last = n % columns == 0, n + columns >= len(panels)  # of its row, of its column
    y = "Neighbours at least as similar" if first else ""
    _style(axes, "Cosine similarity" if last else "", y)
    axes.tick_params(labelbottom=last)
    levels, shown = curves["hair_levels"], np.where(curves["hair"] > 0, curves["hair"], np.nan)
    lines = axes.plot(levels, shown.T, color=BLUE, alpha=0.12, linewidth=0.5, rasterized=True)
    lines[0].set_label("a query")
    for line, text in zip(
      curves["hair_percentiles"], ("5th and 95th percentile", None), strict=True
    ):
      axes.plot(levels, np.where(line > 0, line, np.nan), color=ORANGE, linewidth=1.8, label=text)
    if len(panels) > 1:
      axes.set_title(label, color=INK, fontsize=10)
  most = max(curves["hair"].max() for _, curves in panels)
  low, high = zip(*(_interesting(curves, most) for _, curves in panels), strict=True)
  grid[0].set(yscale="log", ylim=(0.9, most * 1.1), xlim=(min(low), max(high)))
  grid[0].yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
  if len(panels) == 1:
    for line in _legend(grid[0], "lower left").get_lines():
      line.set_alpha(1)
  return figure


def reliability(runs):
  """Precision asked for against precision had, on queries that did not choose the threshold."""
  figure, axes = _axes("Precision asked for (%)", "Precision had on other queries (%)")
  axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, linestyle=":", label="as promised")
  for label, colour, curves in _coloured(runs):
    known = ~np.isnan(curves["reliability"]).all(axis=1)
    if known.any():
      x = 100 * curves["reliability_targets"][known]
      low, middle, high = np.nanpercentile(100 * curves["reliability"][known], (5, 50, 95), axis=1)
      axes.plot(x, middle, color=colour, label=label if len(runs) > 1 else "median of 40 splits")
      if len(runs) == 1:
        band = axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        band.set_label("middle 90 % of splits")
  axes.set(xlim=(0, 100), ylim=(0, 101))
  _legend(axes, "upper left")
  return figure


def save(figure, out_dir, name):
  """Writes name.png and name.svg; returns the SVG for a page, in the page's own ink."""
  with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
    for kind, options in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
      out = io.BytesIO()
      figure.savefig(out, format=kind, transparent=kind == "svg", **options)
      (out_dir / f"{name}.{kind}").write_bytes(out.getvalue())
  svg = out.getvalue().decode()
  svg = svg[svg.index("<svg") :]
  svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
  svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 inherit; font-family: inherit", svg)
  svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
  return Markup(svg)


def _axes(x, y):
  figure = Figure((5.2, 3.9))
  figure.set_layout_engine("constrained")
  axes = figure.subplots()
  _style(axes, x, y)
  return figure, axes


def _style(axes, x, y):
  axes.set_xlabel(x, color=INK)
  axes.set_ylabel(y, color=INK)
  axes.tick_params(which="both", colors=INK, length=0)
  axes.grid(color=FAINT, linewidth=0.6)
  axes.set_axisbelow(True)
  axes.patch.set_alpha(0)
  axes.spines[:].set_visible(False)


def _interesting(curves, most):
  """The cosines between which queries stop having half of all images and start having none."""
  levels, counts = curves["hair_levels"], curves["hair"]
  seen = levels[counts.max(axis=0) > 0]
  return levels[np.median(counts, axis=0) < most / 2].min(), seen.max() + 0.02


def _coloured(runs):
  """(label on its first line, None after; colour; curves) of each run."""
  colour = dict(zip(dict.fromkeys(label for label, _ in runs), COLOURS * 9, strict=False))
  named = set()
  for label, curves in runs:
    yield None if label in named else label, colour[label], curves
    named.add(label)


def _line(axes, curves, x, y, colour, label, **style):
  axes.plot(100 * curves[x], 100 * curves[y], color=colour, label=label, **style)


def _legend(axes, place):
  return axes.legend(loc=place, frameon=False, labelcolor=INK, fontsize=9)
