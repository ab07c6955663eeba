"""The tables of report and comparison: each is shown on the page and written as CSV."""

import csv
import dataclasses
import itertools

from xe_retrieval.report import paper
from xe_retrieval.retrieval.metrics import AT


@dataclasses.dataclass(frozen=True)
class Figure:
  """A number, how it is written, and how sure it is."""

  value: float | None
  digits: int = 2
  low: float | None = None
  high: float | None = None
  std: float | None = None
  mark: str = ""  # "best", "noise"

  def __str__(self):
    if self.value is None:
      return "–"
    spread = "" if self.std is None else f" ± {self.std:.{self.digits}f}"
    return f"{self.value:,.{self.digits}f}{spread}"

  @property
  def range(self):
    return "" if self.low is None else f"{self.low:,.{self.digits}f} – {self.high:,.{self.digits}f}"


@dataclasses.dataclass(frozen=True)
class Table:
  name: str  # of its CSV file
  title: str
  text: str  # how to read it
  columns: list[str]
  rows: list[list]  # str and Figure
  over: tuple[str, ...] = ()  # what stands over each column; equal neighbours share it

  @property
  def spans(self):
    """[(what stands over them, how many columns)], or nothing."""
    return [(title, len(list(same))) for title, same in itertools.groupby(self.over)]

  def write(self, out_dir):
    """name.csv; interval and standard deviation of a figure take columns of their own."""
    columns = []
    over = self.over or [""] * len(self.columns)
    for i, name in enumerate(self.columns):
      name = f"{name} {over[i]}".strip()
      cells = [row[i] for row in self.rows]
      columns.append([name] + [_plain(cell) for cell in cells])
      for extra in ("low", "high", "std"):
        values = [getattr(cell, extra, None) for cell in cells]
        if any(value is not None for value in values):
          columns.append([f"{name} {extra}"] + ["" if v is None else v for v in values])
    with (out_dir / f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
      csv.writer(file).writerows(zip(*columns, strict=True))


def headline(metrics, dataset, loss):
  """PR-AUC, Recall@k and median rank with their intervals; the paper's where it has them."""
  known = paper.figures(dataset, loss) or {}
  distractors = metrics.get("distractors")
  rows = [
    _row("Text → image", metrics, "text_to_image"),
    *([_paper_row(known)] if "text_to_image" in known else []),
    _row("Image → text", metrics, "image_to_text", area=False),
  ]
  if distractors:
    rows.append(_row(f"Text → image, {distractors['images']:,} more", distractors, "text_to_image"))
    if "distractors" in known:
      rows.append(_paper_row(known["distractors"]))
  text = f"{metrics['queries']:,} captions, {metrics['images']:,} images; percent."
  text += " Small print: 95 % of bootstrap samples over the queries."
  if known:
    trained = metrics.get("training_pairs")
    ours = f" This model was trained on {trained:,} pairs." if trained else ""
    text += f"{ours} The paper: {paper.PAIRS[dataset.split('/')[0]]}; the web set has shrunk since."
  columns = ["", "PR-AUC", *(f"Recall@{k}" for k in AT), "Median rank"]
  return Table("headline", "Results", text, columns, rows)


def thresholds(rows, best_f1):
  """thresholds.json as a table, and the threshold with the best F1."""
  true = any("true_precision" in row for row in rows)
  columns = ["Precision asked for", "Cosine at least", "Precision", "Recall", "Pairs returned"]
  columns += ["Queries without result"] + ["True precision"] * true
  return Table(
    "thresholds",
    "Which threshold to ask for",
    "The lowest cosine at which one threshold for all queries has that precision among the pairs "
    "it returns. Percent; small print: bootstrap over queries.",
    columns,
    [*(_threshold_row(row, true) for row in rows), _best_f1_row(best_f1, true)],
  )


def bands(metrics):
  """How far apart the queries' scores lie at the same number of neighbours."""
  return Table(
    "bands",
    "Spread of the queries' scores",
    "Between which cosines 90 % of the queries have their first, tenth, hundredth neighbour: the "
    "distance between the orange lines. Narrower is better calibrated.",
    ["Neighbours", "5th percentile", "Median", "95th percentile", "Width"],
    [
      [Figure(row["neighbours"], 0)] + [Figure(row[k], 3) for k in ("p5", "median", "p95", "width")]
      for row in metrics["calibration"]["bands"]
    ],
  )


def needed(metrics):
  """The threshold that each query would need for itself, against the global one."""
  sources = [("pairing", metrics["calibration"]), ("truth", metrics.get("true_relevance", {}))]
  keys = ("reachable", "p5", "median", "p95", "width", "global_threshold", "above_global")
  digits = (1, 3, 3, 3, 3, 3, 1)
  return Table(
    "score_needed_per_query",
    "What each query would need for itself",
    "The lowest cosine at which a query alone has the precision, over the queries that can reach "
    "it; and the share of these for which the global threshold is too low.",
    ["Precision", "Against", "Queries that can (%)", "5th percentile", "Median", "95th percentile"]
    + ["Width", "Global", "Global too low (%)"],
    [
      [Figure(row["precision"], 0), name]
      + [Figure(row.get(k), d) for k, d in zip(keys, digits, strict=True)]
      for name, part in sources
      for row in part.get("score_needed_per_query", [])
    ],
  )


def index(found):
  """The audit of the index: speed, neighbours found, and what it does to Recall@k."""
  at = list(found["neighbours_found"])
  speed = f"built in {found['build_seconds']:.1f} s, {found['queries_per_second']:,.0f} queries/s "
  speed += f"for {found['neighbours']} neighbours each"
  return Table(
    "index",
    "The index, audited",
    f"{found['kind']}, {found['vectors']:,} vectors, {speed}. Found: share of the true k nearest; "
    "drift: Recall@k through the index less the exact one. Percent.",
    ["k", "Neighbours found", "Recall@k through the index", "Drift"],
    [
      [Figure(int(k), 0), Figure(found["neighbours_found"][k])]
      + [Figure(found[part][f"recall@{k}"]) for part in ("text_to_image", "drift")]
      for k in at
    ],
  )


def judgements(found):
  """Agreement of the score with people."""
  keys = ("kendall_tau_c", "kendall_tau_b", "spearman", "pr_auc")
  return Table(
    "judgements",
    "Agreement with people",
    "Correlation of the score with every single rating, and PR-AUC with the majority as the truth; "
    "percent. Pairs whose caption was written for the very image are left out, as in the "
    "literature.",
    ["File", "Pairs", "Ratings", "Kendall τc", "Kendall τb", "Spearman", "PR-AUC"],
    [
      [name, Figure(one["pairs"], 0), Figure(one["ratings"], 0)] + [Figure(one[k]) for k in keys]
      for name, one in found.items()
    ],
  )


def _row(name, metrics, direction, area=True):
  low_high = metrics["intervals"]
  cells = [Figure(metrics["pr_auc"], 2, *low_high["pr_auc"]) if area else ""]
  for key, value in metrics[direction].items():
    digits = 1 if key == "median_rank" else 2
    cells.append(Figure(value, digits, *low_high[direction][key]))
  return [name, *cells]


def _paper_row(known):
  recall = [Figure(known["text_to_image"].get(f"recall@{k}")) for k in AT]
  return ["the paper", Figure(known.get("pr_auc")), *recall, ""]


def _threshold_row(row, true):
  asked = Figure(100 * row["target_precision"], 0)
  if row["threshold"] is None:
    best = Figure(100 * row["best_precision"], 1)
    return [asked, "out of reach", best, "", "", ""] + [""] * true
  low_high = row["interval"] or (None, None)
  return [
    asked,
    Figure(row["threshold"], 3, *low_high),
    Figure(100 * row["precision"], 1, *(100 * x for x in row["precision_interval"])),
    Figure(100 * row["recall"], 1),
    Figure(row["returned"], 0),
    Figure(100 * row["queries_without_result"], 1),
  ] + ([Figure(100 * row["true_precision"], 1)] if true else [])


def _best_f1_row(best, true):
  precision, recall, without = (
    Figure(best[key], 1) for key in ("precision", "recall", "queries_without_result")
  )
  name = f"best F1, {best['f1']:.1f}"
  return [name, Figure(best["threshold"], 3), precision, recall, "", without] + [""] * true


def _plain(cell):
  value = cell.value if isinstance(cell, Figure) else cell
  return "" if value is None else value
