"""The plots of report and comparison, from curves.npz and metrics.json.

Most take runs as [(label, curves)], one for a report or several in one plot. Runs with the same
label, such as seeds of one loss, share a colour. Those of probabilities and promises take the parts
of metrics.json.
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
SOURCES = ("pairing", "truth", "captions", "people", "words")  # the keys of relevance.MEANING
SOURCES = dict(zip(SOURCES, (BLUE, *COLOURS[2:]), strict=False))
FEWEST = 10  # results of a bin of the reliability diagram
INK, FAINT = "#40464f", "#d9dde3"  # replaced by CSS variables on the page: light or dark


def precision_recall(runs):
  """Precision over recall of all pairs, for one global threshold."""
  figure, axes = _axes("Recall (%)", "Precision (%)")
  many = len(runs) > 1
  for label, colour, curves in _coloured(runs):
    _line(axes, curves, "", colour, label if many else "pairing")
    for name in () if many else SOURCES:
      if f"{name}_recall" in curves:
        _line(axes, curves, f"{name}_", SOURCES[name], name)
    if not many and "distractors_recall" in curves:
      _line(axes, curves, "distractors_", ORANGE, "pairing, with distractors", linestyle="--")
  axes.set(xlim=(0, 100), ylim=(0, 101))
  _legend(axes, *(("upper right",) if many else ("best", "relevance by")))
  return figure


def recall(runs):
  """Recall@k over k, in both directions."""
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
  """The paper's plot: neighbours over similarity, one line per query, 5th and 95th percentile."""
  panels = list({label: curves for label, curves in reversed(runs)}.items())[::-1]
  columns = min(len(panels), 3)
  rows = -(-len(panels) // columns)
  figure = Figure((5.2, 3.9) if len(panels) == 1 else (10.6, 3.7 * rows))
  figure.set_layout_engine("constrained")
  grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  for n, (axes, (label, curves)) in enumerate(zip(grid, panels, strict=False)):
    first, last = n % columns == 0, n + columns >= len(panels)  # in its row, in its column
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


def reliability(probabilities):
  """Share of relevant results over the probability shown, for each gallery and source."""
  figure, axes = _axes("Probability shown (%)", "Results that are relevant (%)")
  axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, linestyle=":", label="ideal")
  galleries = probabilities["galleries"]
  for gallery, style in zip(galleries, ("-", "--"), strict=False):
    for name, found in gallery["relevance"].items():
      bins = [row for row in found["reliability"] if row[2] >= FEWEST]
      mean, share, results = np.array(bins).reshape(-1, 3).T
      label = f"{name}, {gallery['images']:,} images" if len(galleries) > 1 else name
      axes.plot(100 * mean, 100 * share, style, color=SOURCES[name], linewidth=1, label=label)
      area = 4 + 60 * np.sqrt(results / results.max(initial=1))
      axes.scatter(100 * mean, 100 * share, area, color=SOURCES[name], alpha=0.7, linewidth=0)
  axes.set(xlim=(0, 100), ylim=(0, 101))
  _legend(axes, "best", "relevance by")
  return figure


def promises(rows):
  """Precision kept for each one promised, down to its lower bound; with guarantee on the right."""
  figure = Figure((10.6, 3.9))
  figure.set_layout_engine("constrained")
  panels = figure.subplots(1, 2, sharey=True)
  series = list(dict.fromkeys((row["relevance"], row["gallery"]) for row in rows))
  galleries = sorted({images for _, images in series})
  targets = sorted({row["target"] for row in rows})
  wide = min(0.16, 0.8 / len(series))
  for axes, guarantee in zip(panels, (False, True), strict=True):
    _style(axes, "Precision promised (%)", "" if guarantee else "Precision kept (%)")
    axes.set_title("With guarantee" if guarantee else "Without guarantee", color=INK, fontsize=10)
    for x, target in enumerate(targets):
      label = None if x else "promised"
      axes.plot([x - 0.45, x + 0.45], [100 * target] * 2, color=INK, linewidth=1, label=label)
    for n, (name, images) in enumerate(series):
      shown = [
        (targets.index(row["target"]), row["kept"], row["lower_bound"])
        for row in rows
        if (row["relevance"], row["gallery"]) == (name, images)
        and row["guarantee"] == guarantee
        and row["kept"] is not None
      ]
      x, kept, bound = np.array(shown).reshape(-1, 3).T
      x, colour = x + wide * (n - (len(series) - 1) / 2), SOURCES[name]
      fill = colour if images == galleries[0] else "none"  # hollow: the larger gallery
      axes.vlines(x, 100 * bound, 100 * kept, color=colour, linewidth=1, alpha=0.5)
      axes.scatter(x, 100 * bound, 40, marker="_", color=colour)
      axes.scatter(
        x, 100 * kept, 36, edgecolor=colour, facecolor=fill, label=f"{name}, {images:,} images"
      )
    axes.set_xticks(range(len(targets)), [f"{100 * target:.0f}" for target in targets])
    axes.set(xlim=(-0.6, len(targets) - 0.4), ylim=(0, 102))
    axes.xaxis.grid(False)
  _legend(panels[0], "lower right")
  return figure


def save(figure, out_dir, name):
  """Writes name.png and name.svg; returns the SVG for a page, with the page's colours and font."""
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
  """The range of cosines from half of all images as neighbours (median query) to none."""
  levels, counts = curves["hair_levels"], curves["hair"]
  seen = levels[counts.max(axis=0) > 0]
  return levels[np.median(counts, axis=0) < most / 2].min(), seen.max() + 0.02


def _coloured(runs):
  """Yields (label, colour, curves); a repeated label is None, for one legend entry."""
  colour = dict(zip(dict.fromkeys(label for label, _ in runs), COLOURS * 9, strict=False))
  named = set()
  for label, curves in runs:
    yield None if label in named else label, colour[label], curves
    named.add(label)


def _line(axes, curves, prefix, colour, label, **style):
  x, y = (100 * curves[prefix + name] for name in ("recall", "precision"))
  axes.plot(x, y, color=colour, label=label, **style)


def _legend(axes, place, title=""):
  legend = axes.legend(loc=place, frameon=False, labelcolor=INK, fontsize=9, title=title)
  legend.get_title().set(color=INK, fontsize=9)
  return legend
