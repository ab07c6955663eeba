"""Evaluated runs → one table and one page: mean ± std over seeds, with significance tests."""

import dataclasses

import numpy as np
from flax import traverse_util

from xe_retrieval.report import html_tables, page, paper, significance, terminal

COLUMNS = {
  "PR-AUC": ("pr_auc",),
  "R@1": ("text_to_image", "recall@1"),
  "R@5": ("text_to_image", "recall@5"),
  "R@10": ("text_to_image", "recall@10"),
  "R@100": ("text_to_image", "recall@100"),
  "image→text R@1": ("image_to_text", "recall@1"),
}
WITH_DISTRACTORS = {
  "PR-AUC": ("distractors", "pr_auc"),
  **{f"R@{k}": ("distractors", "text_to_image", f"recall@{k}") for k in (1, 5, 10, 100)},
}


@dataclasses.dataclass(frozen=True)
class Run:
  workdir: str
  metrics: dict
  curves: dict[str, np.ndarray]

  @property
  def config(self):
    return self.metrics["config"]


def write(out_dir, runs):
  """Writes compare.html and its CSV files; returns its main tables as text and the page's path."""
  _check(runs)
  groups = group(runs)
  p_values = significance.paired(groups)
  main, rest = [summary(groups, p_values)], [calibration(groups), listing(groups)]
  if any(run.metrics.get("promises") for run in runs):
    main.append(promises(groups))
  if p_values:
    rest.insert(0, pairwise(groups, p_values))
  tables = main + rest
  path = page.write_comparison(out_dir, runs[0].metrics, len(groups), tables, _labelled(groups))
  for one in tables:
    one.write(out_dir)
  return "\n\n".join(map(terminal.table, main)), path


def group(runs):
  """[Run] -> {label: [Run]}: by loss, and by config fields that differ between its runs."""
  by_loss = {}
  for run in runs:
    by_loss.setdefault(run.config["loss"], []).append(run)
  groups = {}
  for loss, same in by_loss.items():
    flat = [traverse_util.flatten_dict(run.config, sep=".") for run in same]
    fields = sorted({field for one in flat for field in one} - {"seed"})
    varied = [f for f in fields if len({str(one.get(f)) for one in flat}) > 1]
    for run, one in zip(same, flat, strict=True):
      named = [paper.NAMES.get(loss, loss)] + ["with bank"] * bool(run.metrics.get("correction"))
      label = " ".join(named + [f"{f}={one.get(f)}" for f in varied])
      groups.setdefault(label, []).append(run)
  for label, same in groups.items():
    seeds = {}
    for run in same:
      if (other := seeds.setdefault(run.config["seed"], run.workdir)) is not run.workdir:
        seed = run.config["seed"]
        raise ValueError(f"{other} and {run.workdir} are the same run: {label}, seed {seed}")
  return groups


def summary(groups, p_values):
  """{label: [Run]} -> the main table, cells marked "best" and "noise" (not significantly worse).

  `p_values` are those of significance.paired.
  """
  runs = [run for same in groups.values() for run in same]
  amounts = {run.metrics.get("distractors", {}).get("images") for run in runs}
  distractors = len(amounts) == 1 and None not in amounts
  columns = [*COLUMNS.items(), *(WITH_DISTRACTORS.items() if distractors else ())]
  names, paths = zip(*columns, strict=True)
  cells = [_column(groups, path, p_values) for path in paths]
  rows = []
  for label, same in groups.items():
    rows.append([label, html_tables.Number(len(same), 0)] + [column[label] for column in cells])
  for label, same in groups.items():
    if all("plain" in run.metrics for run in same):
      plain = [[_get(run.metrics["plain"], path) for run in same] for path in paths]
      name = label.replace("with bank", "plain")
      rows.append([name, html_tables.Number(len(same), 0)] + [_spread(p, 2) for p in plain])
  for label, same in groups.items():
    rows += _reranked(label, same, paths)
  for label, same in groups.items():
    known = paper.figures(same[0].metrics["dataset"], same[0].config["loss"])
    if known:
      rows.append([f"the paper: {label}", ""] + [html_tables.Number(_get(known, p)) for p in paths])
  text = (
    "Percent, mean ± standard deviation over seeds. Bold: best. ≈: not significantly worse than "
    "the best (Welch's t-test over seeds, p ≥ 0.05; where a loss has one seed, a bootstrap over "
    "queries or, for R@1, the paired test over queries, which do not cover the variation between "
    "seeds). With bank: scores are corrected by a bank of training captions and images; plain: the "
    "cosines of the same model, not marked; re-ranked: a joint encoder ordered as many candidates."
  )
  group_titles = ()
  if distractors:
    near, more = runs[0].metrics["images"], runs[0].metrics["distractors"]["images"]
    group_titles = ("",) * 2 + (f"{near:,} images",) * len(COLUMNS)
    group_titles += (f"and {more:,} distractors",) * len(WITH_DISTRACTORS)
  columns = ["Loss", "Seeds", *names]
  return html_tables.Table("comparison", "Results", text, columns, rows, group_titles)


def _reranked(label, runs, paths):
  """A row for each kind of re-ranker behind these runs: its loss and number of candidates."""
  found = {}
  for run in runs:
    if one := run.metrics.get("rerank"):
      found.setdefault((one["loss"], one["candidates"]), []).append(one)
  for (loss, count), same in found.items():
    name = f"{label}, re-ranked {count:,} ({paper.NAMES.get(loss, loss)})"
    cells = [_spread([_get(one, path) for one in same], 2) for path in paths]
    yield [name, html_tables.Number(len(same), 0), *cells]


def promises(groups):
  """{label: [Run]} -> precision kept of each promised, by source of relevance and gallery."""
  found = {}  # (relevance, gallery, label): {(target, guarantee): kept, of each run}
  for label, same in groups.items():
    for run in same:
      for row in run.metrics.get("promises", ()):
        part = found.setdefault((row["relevance"], row["gallery"], label), {})
        kept = part.setdefault((row["target"], row["guarantee"]), [])
        kept += [] if row["kept"] is None else [row["kept"]]
  targets = sorted({target for part in found.values() for target, _ in part})
  rows = []
  for (relevance, images, label), part in sorted(found.items(), key=lambda item: item[0][:2]):
    kept = [_spread([100 * x for x in part.get((t, False), ())], 1) for t in targets]
    bound = [_how_many([x >= t for x in part.get((t, True), ())]) for t in targets]
    rows.append([label, relevance, html_tables.Number(images, 0), *kept, *bound])
  names = [f"{100 * t:.0f} %" for t in targets]
  return html_tables.Table(
    "promises",
    "Promises of precision",
    "Thresholds chosen on the calibration split for the given precision. Kept: the precision they "
    "have here (%), mean ± standard deviation over seeds. With guarantee: in how many runs it was "
    "at least as high as promised. Runs that promise or return nothing are left out; –: all do.",
    ["Loss", "Relevance", "Images", *names, *names],
    rows,
    ("",) * 3 + ("precision kept",) * len(names) + ("runs that kept the guarantee",) * len(names),
  )


def pairwise(groups, p_values):
  """{label: [Run]}, significance.paired -> Recall@1 of each loss against the best one."""
  recall = {
    label: float(np.mean([_get(run.metrics, COLUMNS["R@1"]) for run in same]))
    for label, same in groups.items()
  }
  best = max(recall, key=recall.get)
  rows = []
  for label in [label for label in groups if label != best]:
    gain = significance.differences(groups[label], groups[best])
    better, worse = (html_tables.Number(int((sign * gain > 0).sum()), 0) for sign in (1, -1))
    behind = html_tables.Number(recall[label] - recall[best])
    rows.append([label, behind, better, worse, f"{p_values[label, best]:.2g}"])
  rows.sort(key=lambda row: -row[1].value)
  grouped = "query_image" in groups[best][0].curves
  return html_tables.Table(
    "pairwise",
    "Query by query",
    f"R@1 against that of the best, {best}, on the same queries: difference in points; "
    f"{'images whose captions' if grouped else 'queries that'} it answers better or worse, in the "
    "mean over seeds; p of an exact sign-flip test (McNemar's for single seeds and captions), "
    "corrected by Holm's method for all pairs of losses. It judges these trained models, not the "
    "variation between seeds.",
    ["Loss", "R@1 against the best", "Better", "Worse", "p"],
    rows,
  )


def calibration(groups):
  """{label: [Run]} -> how well scores and probabilities of different queries compare."""
  ks = [row["neighbours"] for row in next(iter(groups.values()))[0].metrics["calibration"]["bands"]]
  rows = []
  for label, same in groups.items():
    parts = [run.metrics["calibration"] for run in same]
    widths = zip(*([b["width"] for b in part["bands"]] for part in parts), strict=True)
    figures = [_spread([part.get(k) for part in parts], 4) for k in ("ece", "opis", "opis_strict")]
    ratio = _spread([html_tables.ap_ratio(part) for part in parts], 3)
    rows.append([label, *(_spread(values, 3) for values in widths), *figures, ratio])
  return html_tables.Table(
    "calibration",
    "Calibration",
    "Band: distance between the 5th and the 95th percentile, over queries, of the cosine of the "
    "k-th neighbour. ECE: error of the probabilities shown beside the first ten results, by the "
    "best source of relevance. OPIS: variance between queries of how well one threshold serves "
    "them, where it lets 1–10 % (strict: 0.01–0.1 %) of the non-matches pass. For all these, less "
    "is better. AP ratio: average precision of one threshold for all queries over the mean of that "
    "of each query; 1 is best.",
    ["Loss", *map(str, ks), "ECE", "OPIS", "OPIS strict", "AP ratio"],
    rows,
    ("",) + ("band at neighbour",) * len(ks) + ("probabilities",) + ("scores",) * 3,
  )


def listing(groups):
  """{label: [Run]} -> one row per run."""
  return html_tables.Table(
    "runs",
    "Runs",
    "Each run separately.",
    ["Workdir", "Loss", "Seed", "Step", *COLUMNS],
    [
      [run.workdir, label, str(run.config["seed"]), html_tables.Number(run.metrics["step"], 0)]
      + [html_tables.Number(_get(run.metrics, path)) for path in COLUMNS.values()]
      for label, same in groups.items()
      for run in same
    ],
  )


def _column(groups, path, p_values):
  """{label: [Run]}, key path in metrics.json -> {label: Number}, with marks."""
  values = {label: [_get(run.metrics, path) for run in same] for label, same in groups.items()}
  best = max(values, key=lambda label: np.mean(values[label]))
  out = {}
  for label, same in groups.items():
    mark = "best" if label == best else ""
    if label != best and _noise(groups[best], same, path, p_values.get((best, label))):
      mark = "noise"
    out[label] = dataclasses.replace(_spread(values[label], 2), mark=mark)
  return out


def _noise(best, other, path, paired):
  """Whether the difference between two groups of runs is not significant at the 5 % level."""
  a, b = ([_get(run.metrics, path) for run in runs] for runs in (best, other))
  if len(a) > 1 and len(b) > 1:
    return significance.over_seeds(a, b) >= significance.LEVEL
  if len(a) == len(b) == 1 and path == COLUMNS["R@1"] and paired is not None:
    return paired >= significance.LEVEL
  error = [_standard_error(runs, path) for runs in (best, other)]
  return abs(np.mean(a) - np.mean(b)) < 1.96 * np.hypot(*error)


def _standard_error(runs, path):
  """Standard error of the mean over seeds; of a single run, from its bootstrap interval."""
  if len(runs) > 1:
    return np.std([_get(run.metrics, path) for run in runs], ddof=1) / np.sqrt(len(runs))
  metrics = runs[0].metrics
  if path[0] == "distractors":
    metrics, path = metrics["distractors"], path[1:]
  low, high = _get(metrics["intervals"], path)
  return (high - low) / (2 * 1.96)


def _spread(values, digits):
  """Values over seeds -> mean ± std of those that are known; a single run has no std."""
  known = [value for value in values if value is not None]
  if not known:
    return html_tables.Number(None)
  std = float(np.std(known, ddof=1)) if len(known) > 1 else None
  return html_tables.Number(float(np.mean(known)), digits, std=std)


def _how_many(flags):
  return f"{sum(flags)} of {len(flags)}" if flags else "–"


def _labelled(groups):
  return [(label, run.curves) for label, same in groups.items() for run in same]


def _check(runs):
  """Refuses runs that were evaluated on different captions or images."""
  key = lambda run: tuple(run.metrics[k] for k in ("dataset", "split", "queries", "images"))  # noqa: E731
  for run in runs[1:]:
    if key(run) != key(runs[0]):
      raise ValueError(
        "these were not evaluated on the same data: "
        + " and ".join(
          "{}:{}, {} captions, {} images".format(*key(r)) + f" ({r.workdir})"
          for r in (runs[0], run)
        )
      )


def _get(metrics, path):
  for name in path:
    metrics = None if metrics is None else metrics.get(name)
  return metrics
