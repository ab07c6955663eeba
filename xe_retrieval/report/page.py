"""One self-contained HTML page per evaluation: no server, no network, no script."""

import json
import pathlib

import jinja2
from etils import epath

from xe_retrieval.data import paths
from xe_retrieval.evaluation import score_tiles
from xe_retrieval.evaluation.relevance import MEANING
from xe_retrieval.report import gallery, html_tables, paper, plots


def write(out_dir, title, config, step, evaluation, pairs, sources, calibration=None):
  """Writes report.html, and beside it each plot as PNG and SVG and each table as CSV.

  `sources` of relevance come best first. With a calibration, the examples show probabilities.
  """
  out_dir = epath.Path(out_dir)
  metrics = evaluation.metrics
  headline = html_tables.headline(metrics, metrics.get("dataset", ""), config.get("loss", ""))
  tables = [html_tables.rerank(metrics["rerank"])] if "rerank" in metrics else []
  tables += [html_tables.promises(metrics)] if metrics.get("promises") else []
  tables.append(html_tables.calibration(metrics))
  tables += [html_tables.relevance(metrics)] if metrics["relevance"] else []
  last = [html_tables.bands(metrics)]
  last += [getattr(html_tables, n)(metrics[n]) for n in ("index", "judgements") if n in metrics]
  shown = gallery.shown(pairs, metrics["calibration"]["best_f1"]["threshold"], calibration)
  source = sources[0]
  _render(
    "report.html",
    out_dir / "report.html",
    title=title,
    loss=paper.NAMES.get(config.get("loss"), config.get("loss", "")),
    step=step,
    metrics=metrics,
    headline=headline,
    tables=tables,
    last_tables=last,
    figures=_figures(out_dir, _plots(evaluation)),
    legend=shown.legend,
    also_relevant="" if source.name == "pairing" else MEANING[source.name],
    sections=gallery.sections(pairs, evaluation, source, shown),
    config=json.dumps(config, indent=2, sort_keys=True, default=str),
  )
  for table in (headline, *tables, *last):
    table.write(out_dir)
  return out_dir / "report.html"


def write_comparison(out_dir, metrics, losses, tables, runs):
  """Writes compare.html: tables, and plots of all runs, given as [(label, curves)]."""
  path = out_dir / "compare.html"
  figures = _figures(
    out_dir,
    {n: getattr(plots, n)(runs) for n in ("score_distributions", "precision_recall", "recall")},
  )
  _render(
    "compare.html",
    path,
    title=f"{metrics['dataset']} · {metrics['split']}",
    metrics=metrics,
    losses=losses,
    runs=len(runs),
    tables=tables,
    figures=figures,
  )
  return path


def _plots(evaluation):
  """{name: Figure} of everything that this evaluation has."""
  metrics, runs = evaluation.metrics, [("", evaluation.curves)]
  drawn = {
    n: getattr(plots, n)(runs) for n in ("precision_recall", "score_distributions", "recall")
  }
  if "probabilities" in metrics:
    drawn["reliability"] = plots.reliability(metrics["probabilities"])
  if any(row["kept"] is not None for row in metrics.get("promises", ())):
    drawn["promises"] = plots.promises(metrics["promises"])
  return drawn


def _figures(out_dir, drawn):
  """{name: Figure} -> name, title, text and SVG of each."""
  return [
    {"name": n, **_CAPTIONS[n], "svg": plots.save(drawn[n], out_dir, n)}
    for n in score_tiles.progress(list(drawn), "plots")
  ]


_CAPTIONS = {
  "precision_recall": {
    "title": "Precision and recall of one threshold",
    "text": "All caption × image pairs, sorted by score. The area under the curve, PR-AUC, is high "
    "only if scores of different queries are comparable.",
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
    "title": "Reliability of the probability",
    "text": "Of the first ten results of each query, those shown with a given probability: how "
    f"many are relevant. Larger dots stand for more results; fewer than {plots.FEWEST} have none.",
  },
  "promises": {
    "title": "Promises of precision",
    "text": "Circles: the precision that thresholds kept here, which were chosen elsewhere for the "
    "precision promised; hollow: in the larger collection. Ticks: the calibration's lower bound.",
  },
}


def _render(template, path, **values):
  loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
  environment = jinja2.Environment(
    loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
  )
  paths.write(path, environment.get_template(template).render(**values))
