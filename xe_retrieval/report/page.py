"""One self-contained HTML page per evaluation: no server, no network, no script."""

import json
import pathlib

import jinja2

from xe_retrieval.report import gallery, paper, plots, tables
from xe_retrieval.retrieval import tiles


def write(out_dir, title, config, step, evaluation, pairs):
  """Writes report.html, and each plot as PNG and SVG and each table as CSV beside it."""
  out_dir = pathlib.Path(out_dir)
  metrics = evaluation.metrics
  shown = [
    tables.headline(metrics, metrics.get("dataset", ""), config.get("loss", "")),
    tables.thresholds(evaluation.thresholds, metrics["calibration"]["best_f1"]),
    tables.bands(metrics),
    tables.needed(metrics),
  ]
  shown += [getattr(tables, n)(metrics[n]) for n in ("index", "judgements") if n in metrics]
  threshold = metrics["calibration"]["best_f1"]["threshold"]
  _render(
    "report.html",
    out_dir / "report.html",
    title=title,
    loss=paper.NAMES.get(config.get("loss"), config.get("loss", "")),
    step=step,
    metrics=metrics,
    headline=shown[0],
    tables=shown[1:],
    figures=_figures(out_dir, [("", evaluation.curves)], _CAPTIONS),
    threshold=threshold,
    sections=gallery.sections(pairs, evaluation, threshold),
    config=json.dumps(config, indent=2, sort_keys=True, default=str),
  )
  for table in shown:
    table.write(out_dir)
  return out_dir / "report.html"


def write_comparison(out_dir, metrics, shown, runs):
  """Writes compare.html: tables.Table list, runs as [(label, curves)] laid over each other."""
  title = f"{metrics['dataset']} · {metrics['split']}"
  path = out_dir / "compare.html"
  figures = _figures(out_dir, runs, ("score_distributions", "precision_recall", "recall"))
  _render("compare.html", path, title=title, metrics=metrics, tables=shown, figures=figures)
  return path


def _figures(out_dir, runs, names):
  """[(label, curves)], names of plots -> what the page says about each, and the plot."""
  return [
    {"name": n, **_CAPTIONS[n], "svg": plots.save(getattr(plots, n)(runs), out_dir, n)}
    for n in tiles.progress(list(names), "plots")
  ]


_CAPTIONS = {
  "precision_recall": {
    "title": "Precision and recall of one threshold",
    "text": "All caption × image pairs, sorted by score. The area under the curve is PR-AUC: high "
    "only if scores of different queries can be compared.",
  },
  "score_distributions": {
    "title": "Score distributions",
    "text": "Each blue line is a query: how many images are at least this similar to it. 90 % of "
    "the queries lie between the orange lines; the closer together, the better calibrated.",
  },
  "recall": {
    "title": "Recall at k",
    "text": "Share of queries whose right answer is among the first k.",
  },
  "reliability": {
    "title": "Does the threshold keep its promise?",
    "text": "A threshold chosen on half of the queries for some precision, measured on the other.",
  },
}


def _render(template, path, **values):
  loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
  environment = jinja2.Environment(
    loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
  )
  path.write_text(environment.get_template(template).render(**values), encoding="utf-8")
