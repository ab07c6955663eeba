"""The tables of report and comparison, for the HTML page and as CSV files."""

import csv
import dataclasses
import io
import itertools

from xe_retrieval.calibration.counts import CONFIDENCE
from xe_retrieval.data import paths
from xe_retrieval.evaluation.ranks import AT
from xe_retrieval.evaluation.relevance import MEANING
from xe_retrieval.report import paper
from xe_retrieval.towers import bank


@dataclasses.dataclass(frozen=True)
class Number:
  """A number with its format, and its interval or standard deviation."""

  value: float | None
  digits: int = 2
  low: float | None = None
  high: float | None = None
  std: float | None = None
  mark: str = ""  # "best", "noise", "broken"

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
  name: str  # of the CSV file
  title: str
  text: str  # how to read it
  columns: list[str]
  rows: list[list]  # str and Number
  group_titles: tuple[str, ...] = ()  # one per column; equal neighbours share a header

  @property
  def groups(self):
    """[(title, number of columns)] of the headers above the column names."""
    return [(title, len(list(same))) for title, same in itertools.groupby(self.group_titles)]

  def write(self, out_dir):
    """Writes name.csv; intervals and standard deviations get their own columns."""
    columns = []
    titles = self.group_titles or [""] * len(self.columns)
    for i, name in enumerate(self.columns):
      name = f"{name} {titles[i]}".strip()
      cells = [row[i] for row in self.rows]
      columns.append([name] + [_plain(cell) for cell in cells])
      for extra in ("low", "high", "std"):
        values = [getattr(cell, extra, None) for cell in cells]
        if any(value is not None for value in values):
          columns.append([f"{name} {extra}"] + ["" if v is None else v for v in values])
    file = io.StringIO()
    csv.writer(file).writerows(zip(*columns, strict=True))
    paths.write(out_dir / f"{self.name}.csv", file.getvalue())


def headline(metrics, dataset, loss):
  """PR-AUC, Recall@k and median rank with intervals, beside the paper's where it has them."""
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
  if plain := metrics.get("plain"):
    rows.append(_row("Text → image, plain cosines", plain, "text_to_image"))
    rows.append(_row("Image → text, plain cosines", plain, "image_to_text", area=False))
    if distractors:
      rows.append(_row("… among those more", plain["distractors"], "text_to_image"))
  text = f"{metrics['queries']:,} captions, {metrics['images']:,} images; percent. Right: the "
  text += (
    "image that the caption was written for. Small print: 95 % bootstrap intervals over queries."
  )
  if plain:
    text += f" Scores: {bank.in_words(metrics['correction'])}."
  if known:
    trained = metrics.get("training_pairs")
    ours = f" This model was trained on {trained:,} pairs." if trained else ""
    theirs = paper.PAIRS[dataset.split("/")[0]]
    text += f"{ours} The paper: {theirs}; many of these images have since gone offline."
  columns = ["", "PR-AUC", *(f"Recall@{k}" for k in AT), "Median rank"]
  return Table("headline", "Results", text, columns, rows)


def bands(metrics):
  """Spread over queries of the score of the k-th neighbour."""
  return Table(
    "bands",
    "Spread of the queries' scores",
    "The cosine of each query's k-th neighbour; 90 % of the queries lie between the 5th and the "
    "95th percentile, the orange lines of the plot. Narrower is better calibrated.",
    ["Neighbours", "5th percentile", "Median", "95th percentile", "Width"],
    [
      [Number(row["neighbours"], 0)] + [Number(row[k], 3) for k in ("p5", "median", "p95", "width")]
      for row in metrics["calibration"]["bands"]
    ],
  )


def promises(metrics):
  """Precision promised by the calibration and kept here, without and with guarantee."""
  found = {}
  for row in metrics["promises"]:
    key = (row["relevance"], row["gallery"], row["target"])
    found.setdefault(key, {})[row["guarantee"]] = row
  return Table(
    "promises",
    "Promises of precision",
    f"Thresholds chosen on {metrics['probabilities']['calibrated_on']} so that the results have "
    "the promised precision, and the precision that they kept here. Lower bound: what the "
    f"calibration was {100 * CONFIDENCE:.0f} % confident of; with guarantee, this bound reaches "
    "the promise. Answered: queries with a result. Percent; orange: a guarantee that was not kept.",
    ["Relevance", "Images", "Promised"] + ["Kept", "Lower bound", "Answered"] * 2,
    [
      [relevance, Number(images, 0), Number(100 * target, 0)]
      + [cell for guarantee in (False, True) for cell in _promise(rows.get(guarantee))]
      for (relevance, images, target), rows in found.items()
    ],
    ("",) * 3 + ("Without guarantee",) * 3 + ("With guarantee",) * 3,
  )


def calibration(metrics):
  """How true the shown probabilities are, and how well scores of different queries compare."""
  found, shown = metrics["calibration"], metrics.get("probabilities")
  spread = [Number(found.get(key), 4) for key in ("opis", "opis_strict")]
  spread += [Number(_percent(found.get(key))) for key in ("ap_global", "ap_per_query")]
  spread.append(Number(ap_ratio(found), 3))
  judged = [
    (name, gallery["images"], one)
    for gallery in (shown["galleries"] if shown else ())
    for name, one in gallery["relevance"].items()
  ] or [("pairing", metrics["images"], {})]
  if not shown:
    text = "This model is not calibrated: there are no probabilities to judge."
  elif shown["seen"]:
    text = f"Calibrated on {shown['calibrated_on']}, which are these very pairs: probabilities "
    text += "look better here than on new data, and promises are not judged."
  else:
    text = f"Calibrated on {shown['calibrated_on']}."
  return Table(
    "calibration",
    "Calibration",
    f"{text} ECE and Brier score: errors of the probability shown beside the first ten results of "
    "each query. OPIS: variance between queries of how well one threshold serves them, where it "
    "lets 1–10 % (strict: 0.01–0.1 %) of the non-matches pass. All four: 0 is best. Average "
    "precision (%) of one threshold for all queries, the mean of that of each query, and their "
    "ratio: 1 if scores of different queries compare as well as those of one.",
    ["Relevance", "Images", "ECE", "Brier score", "OPIS", "OPIS strict", "AP, one threshold"]
    + ["AP, per query", "Ratio"],
    [
      [name, Number(images, 0), Number(one.get("ece"), 4), Number(one.get("brier"), 4)]
      + (spread if (name, images) == ("pairing", metrics["images"]) else [""] * len(spread))
      for name, images, one in judged
    ],
  )


def relevance(metrics):
  """Retrieval figures by every source of relevance; by the pairing R is 1."""
  first = metrics["text_to_image"]["recall@1"]
  pairing = {"relevant_per_query": 1, "queries": metrics["queries"], "pr_auc": metrics["pr_auc"]}
  pairing |= {"map_at_r": first, "r_precision": first}
  digits = {"relevant_per_query": 1, "queries": 0, "pr_auc": 2, "map_at_r": 2, "r_precision": 2}
  return Table(
    "relevance",
    "By source of relevance",
    "Which images count as relevant to a caption, and the figures that follow; percent. R: the "
    "number of relevant images of a query. mAP@R: average precision of its first R results; "
    "R-Precision: share of relevant images among them.",
    ["Relevant if", "Relevant per query", "Queries", "PR-AUC", "mAP@R", "R-Precision"],
    [
      [f"{name}: {MEANING[name]}"] + [Number(one[k], d) for k, d in digits.items()]
      for name, one in (metrics["relevance"] | {"pairing": pairing}).items()
    ],
  )


def ap_ratio(found):
  """metrics.json's `calibration` -> ap_global / ap_per_query; None of older evaluations."""
  whole, each = found.get("ap_global"), found.get("ap_per_query")
  return whole / each if whole is not None and each else None


def index(found):
  """The audit of the index: speed, neighbours found, and the effect on Recall@k."""
  at = list(found["neighbours_found"])
  speed = f"built in {found['build_seconds']:.1f} s, {found['queries_per_second']:,.0f} queries/s "
  speed += f"for {found['neighbours']} neighbours each"
  return Table(
    "index",
    "Accuracy of the index",
    f"{found['kind']}, {found['vectors']:,} vectors, {speed}. Found: share of the exact k nearest; "
    "drift: Recall@k with the index minus exact Recall@k. Percent.",
    ["k", "Neighbours found", "Recall@k through the index", "Drift"],
    [
      [Number(int(k), 0), Number(found["neighbours_found"][k])]
      + [Number(found[part][f"recall@{k}"]) for part in ("text_to_image", "drift")]
      for k in at
    ],
  )


def rerank(found):
  """Before and after a joint encoder has ordered the first candidates."""
  speed = found["pairs_per_second"]
  return Table(
    "rerank",
    "Re-ranked",
    f"A joint encoder ({paper.NAMES.get(found['loss'], found['loss'])}) reads the first "
    f"{found['candidates']:,} images of each caption; final score: scale × first stage + "
    f"{found['weight']:g} × its logit, weighed on {found['chosen_on']}"
    + (", which are these very pairs" * found["seen"])
    + f". Pairs that it does not read lie below. It can reach a recall of {found['ceiling']:.2f}, "
    f"stores {found['bytes_per_image']:,} bytes of an image"
    + (f" and read {speed:,.0f} pairs/s. " if speed else ". ")
    + "ECE: of the first ten results, one curve for all captions. Percent, but for ECE.",
    ["", "PR-AUC", *(f"Recall@{k}" for k in AT), "Median rank", "ECE"],
    [
      [*_row(title, part, "text_to_image"), Number(found["calibration"][name]["ece"], 4)]
      for title, name, part in (
        ("First stage", "first_stage", found["first_stage"]),
        (f"Re-ranked {found['candidates']:,}", "reranked", found),
      )
    ],
  )


def judgements(found):
  """Agreement of the scores with human ratings."""
  keys = ("kendall_tau_c", "kendall_tau_b", "spearman", "pr_auc")
  return Table(
    "judgements",
    "Agreement with human ratings",
    "Correlation of the score with the individual ratings, and PR-AUC against the majority vote; "
    "percent. Pairs of a caption and the image it was written for are left out, as in the "
    "literature.",
    ["File", "Pairs", "Ratings", "Kendall τc", "Kendall τb", "Spearman", "PR-AUC"],
    [
      [name, Number(one["pairs"], 0), Number(one["ratings"], 0)] + [Number(one[k]) for k in keys]
      for name, one in found.items()
    ],
  )


def _row(name, metrics, direction, area=True):
  low_high = metrics.get("intervals", {})  # plain cosines have none
  cells = [Number(metrics["pr_auc"], 2, *low_high.get("pr_auc", ())) if area else ""]
  for key, value in metrics[direction].items():
    digits = 1 if key == "median_rank" else 2
    cells.append(Number(value, digits, *low_high.get(direction, {}).get(key, ())))
  return [name, *cells]


def _paper_row(known):
  recall = [Number(known["text_to_image"].get(f"recall@{k}")) for k in AT]
  return ["the paper", Number(known.get("pr_auc")), *recall, ""]


def _promise(row):
  """Kept, lower bound, and share of queries with a result, of one row of `promises`."""
  if row is None or row["threshold"] is None:
    return ["cannot be promised", Number(None), Number(None)]
  broken = row["guarantee"] and row["kept"] is not None and row["kept"] < row["target"]
  kept = Number(_percent(row["kept"]), 1, mark="broken" if broken else "")
  cells = [Number(100 * row[key], 1) for key in ("lower_bound", "returned")]
  return ["nothing returned" if row["kept"] is None else kept, *cells]


def _percent(share):
  return None if share is None else 100 * share


def _plain(cell):
  value = cell.value if isinstance(cell, Number) else cell
  return "" if value is None else value
