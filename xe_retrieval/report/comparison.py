"""Many evaluated runs → one table and one page: mean ± std over seeds, and what is only noise."""

import dataclasses

import numpy as np
from scipy import stats

from xe_retrieval.report import page, paper, tables
from xe_retrieval.retrieval.thresholds import TARGETS

COLUMNS = {
  "PR-AUC": ("pr_auc",),
  "R@1": ("text_to_image", "recall@1"),
  "R@5": ("text_to_image", "recall@5"),
  "R@10": ("text_to_image", "recall@10"),
  "R@100": ("text_to_image", "recall@100"),
  "image→text R@1": ("image_to_text", "recall@1"),
}
FAR = {  # among distractors as well
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
  """Path, [Run] -> the table as text, and the path of compare.html."""
  _check(runs)
  groups = group(runs)
  table = summary(groups)
  shown = [table, bands(groups)]
  if all("transfer" in run.metrics for run in runs):
    shown.append(transfer(groups))
  shown.append(listing(groups))
  path = page.write_comparison(out_dir, runs[0].metrics, shown, _labelled(groups))
  for one in shown:
    one.write(out_dir)
  return as_text(table), path


def group(runs):
  """[Run] -> {label: [Run]}: by loss, and by what else differs between runs of one loss."""
  by_loss = {}
  for run in runs:
    by_loss.setdefault(run.config["loss"], []).append(run)
  groups = {}
  for loss, same in by_loss.items():
    flat = [_flat(run.config) for run in same]
    fields = sorted({field for one in flat for field in one} - {"seed"})
    varied = [f for f in fields if len({str(one.get(f)) for one in flat}) > 1]
    for run, one in zip(same, flat, strict=True):
      label = " ".join([paper.NAMES.get(loss, loss)] + [f"{f}={one.get(f)}" for f in varied])
      groups.setdefault(label, []).append(run)
  for label, same in groups.items():
    seeds = {}
    for run in same:
      if (other := seeds.setdefault(run.config["seed"], run.workdir)) is not run.workdir:
        seed = run.config["seed"]
        raise ValueError(f"{other} and {run.workdir} are the same run: {label}, seed {seed}")
  return groups


def summary(groups):
  """{label: [Run]} -> the main table; `best` and `noise` mark the cells."""
  runs = [run for same in groups.values() for run in same]
  amounts = {run.metrics.get("distractors", {}).get("images") for run in runs}
  far = len(amounts) == 1 and None not in amounts
  columns = [*COLUMNS.items(), *(FAR.items() if far else ())]
  names, paths = zip(*columns, strict=True)
  cells = [_column(groups, path) for path in paths]
  rows = []
  for label, same in groups.items():
    rows.append([label, tables.Figure(len(same), 0)] + [column[label] for column in cells])
  for label, same in groups.items():
    known = paper.figures(same[0].metrics["dataset"], same[0].config["loss"])
    if known:
      rows.append([f"the paper: {label}", ""] + [tables.Figure(_get(known, p)) for p in paths])
  text = "Percent, mean ± standard deviation over seeds. Bold: best. ≈: the difference to the best "
  text += (
    "may be noise (Welch's t-test over seeds, p ≥ 0.05; where a loss has one seed, a bootstrap "
  )
  text += "over queries, which does not know how much another seed would change)."
  over = ()
  if far:
    near, more = runs[0].metrics["images"], runs[0].metrics["distractors"]["images"]
    over = ("",) * 2 + (f"{near:,} images",) * len(COLUMNS)
    over += (f"and {more:,} distractors",) * len(FAR)
  return tables.Table("comparison", "Results", text, ["Loss", "Seeds", *names], rows, over)


def bands(groups):
  """{label: [Run]} -> width of the band that holds 90 % of the queries, and recall at precision."""
  ks = [row["neighbours"] for row in next(iter(groups.values()))[0].metrics["calibration"]["bands"]]
  targets = ("50", "80", "90", "95")
  rows = []
  for label, same in groups.items():
    parts = [run.metrics["calibration"] for run in same]
    widths = [[b["width"] for b in part["bands"]] for part in parts]
    recall = [[part["recall_at_precision"][t] for t in targets] for part in parts]
    means = [_spread(values, 3) for values in zip(*widths, strict=True)]
    rows.append([label, *means, *(_spread(values, 2) for values in zip(*recall, strict=True))])
  return tables.Table(
    "calibration",
    "Calibration",
    "Band: distance between the cosines at which the 5th and the 95th percentile of the queries "
    "have their k-th neighbour; narrower is better. Recall (%) of one global threshold that has "
    "the given precision; higher is better.",
    ["Loss", *(f"Band at {k}" for k in ks), *(f"Recall at precision {t}" for t in targets)],
    rows,
  )


def transfer(groups):
  """{label: [Run]} -> what thresholds that were chosen on other data give on these."""
  rows = []
  for label, same in groups.items():
    parts = [_by_target(run) for run in same]
    found = [[part[t]["precision"] for part in parts if t in part] for t in TARGETS]
    found = [[100 * p for p in values if p is not None] for values in found]
    rows.append([label, *(_spread(v, 1) if v else tables.Figure(None) for v in found)])
  return tables.Table(
    "transfer",
    "Thresholds chosen elsewhere",
    "Precision (%) here of the thresholds that have the given precision on the data where they "
    "were chosen; –: none reaches it there.",
    ["Loss", *(f"Chosen for {100 * t:.0f}" for t in TARGETS)],
    rows,
  )


def _by_target(run):
  return {row["target_precision"]: row for row in run.metrics["transfer"]["thresholds"]}


def listing(groups):
  """{label: [Run]} -> one row per run."""
  return tables.Table(
    "runs",
    "Runs",
    "Every run by itself.",
    ["Workdir", "Loss", "Seed", "Step", *COLUMNS],
    [
      [run.workdir, label, str(run.config["seed"]), tables.Figure(run.metrics["step"], 0)]
      + [tables.Figure(_get(run.metrics, path)) for path in COLUMNS.values()]
      for label, same in groups.items()
      for run in same
    ],
  )


def as_text(table):
  """A table for the terminal; * is the best of a column, ≈ may be as good."""
  marks = {"best": "*", "noise": "≈", "": " "}
  lines = [[f"{name} " for name in table.columns]]  # above the digits, beside the marks
  for row in table.rows:
    lines.append([f"{v}{marks[v.mark]}" if isinstance(v, tables.Figure) else v for v in row])
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  align = lambda i, text: text.ljust(widths[i]) if i == 0 else text.rjust(widths[i])  # noqa: E731
  text = ["  ".join(align(i, v) for i, v in enumerate(line)) for line in lines]
  text.insert(1, "─" * len(text[0]))
  if table.over:
    text.insert(0, _over(table, widths))
  return "\n".join(text + ["* best   ≈ within noise of the best"])


def _over(table, widths):
  """The line over the columns: each title in the middle of what it stands over."""
  parts, first = [], 0
  for title, count in table.spans:
    room = sum(widths[first : first + count]) + 2 * (count - 1)
    parts.append(f" {title} ".center(room, "─" if title else " ")[:room])
    first += count
  return "  ".join(parts)


def _column(groups, path):
  """{label: [Run]}, where in metrics.json -> {label: Figure}, the best and its equals marked."""
  values = {label: [_get(run.metrics, path) for run in same] for label, same in groups.items()}
  best = max(values, key=lambda label: np.mean(values[label]))
  out = {}
  for label, same in groups.items():
    mark = "best" if label == best else ""
    if label != best and _noise(groups[best], same, path):
      mark = "noise"
    out[label] = dataclasses.replace(_spread(values[label], 2), mark=mark)
  return out


def _noise(best, other, path):
  """Whether two groups of runs may differ by chance only, at the 5 % level."""
  a, b = ([_get(run.metrics, path) for run in runs] for runs in (best, other))
  if len(a) > 1 and len(b) > 1:
    if np.ptp(a) == np.ptp(b) == 0:
      return np.mean(a) == np.mean(b)
    return stats.ttest_ind(a, b, equal_var=False).pvalue >= 0.05
  error = [_standard_error(runs, path) for runs in (best, other)]
  return abs(np.mean(a) - np.mean(b)) < 1.96 * np.hypot(*error)


def _standard_error(runs, path):
  """Of the mean over seeds; of one run, from its bootstrap interval."""
  if len(runs) > 1:
    return np.std([_get(run.metrics, path) for run in runs], ddof=1) / np.sqrt(len(runs))
  *above, metrics = (
    [runs[0].metrics] if path[0] != "distractors" else [None, runs[0].metrics["distractors"]]
  )
  low, high = _get(metrics["intervals"], path[len(above) :])
  return (high - low) / (2 * 1.96)


def _spread(values, digits):
  """Values over seeds -> mean ± std, or the value itself of a single run."""
  std = float(np.std(values, ddof=1)) if len(values) > 1 else None
  return tables.Figure(float(np.mean(values)), digits, std=std)


def _labelled(groups):
  return [(label, run.curves) for label, same in groups.items() for run in same]


def _check(runs):
  """Runs are comparable only on the same captions and images."""
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


def _flat(value, prefix=""):
  if not isinstance(value, dict):
    return {prefix[:-1]: value}
  return {k: v for name in value for k, v in _flat(value[name], f"{prefix}{name}.").items()}
