"""What commands print of figures."""

from xe_retrieval.evaluation.relevance import MEANING
from xe_retrieval.report.html_tables import Number
from xe_retrieval.towers import bank


def evaluation(metrics):
  """The headline figures for a terminal."""
  rows = [(f"{metrics['queries']:,} × {metrics['images']:,}", metrics)]
  if "distractors" in metrics:
    rows.append((f"+ {metrics['distractors']['images']:,}", metrics["distractors"]))
  if plain := metrics.get("plain"):
    rows.append(("plain cosines", plain))
    if "distractors" in plain:
      rows.append((f"+ {plain['distractors']['images']:,}, plain", plain["distractors"]))
  names = ("recall@1", "recall@5", "recall@10", "recall@100", "median_rank")
  lines = [" " * 28 + "  PR-AUC" + "".join(f"{n.replace('recall', 'R'):>13}" for n in names)]
  for label, part in rows:
    for direction in ("text_to_image", "image_to_text"):
      if direction in part:
        area = f"{part['pr_auc']:8.2f}" if direction == "text_to_image" else " " * 8
        title = f"{direction.replace('_', ' ')} {label}"
        lines.append(f"{title:28}{area}" + "".join(f"{part[direction][n]:13.2f}" for n in names))
  if found := metrics.get("rerank"):
    lines += _rerank_lines(found, names)
  if plain:
    lines.append(f"scores: {bank.in_words(metrics['correction'])}")
  lines += [_relevance_line(*item) for item in metrics.get("relevance", {}).items()]
  if "probabilities" in metrics:
    lines += _probability_lines(metrics)
  if metrics.get("training_pairs"):
    lines.append(f"trained on {metrics['training_pairs']:,} pairs")
  if "index" in metrics:
    lines.append(_index_line(metrics["index"]))
  lines += [_judgements_line(*item) for item in metrics.get("judgements", {}).items()]
  return "\n".join(lines)


def table(table):
  """A table for the terminal; * marks the best of a column, ≈ not significantly worse."""
  marks = {"best": "*", "noise": "≈", "": " "}
  lines = [[f"{name} " for name in table.columns]]  # a space for the mark
  for row in table.rows:
    lines.append([f"{v}{marks[v.mark]}" if isinstance(v, Number) else v for v in row])
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  align = lambda i, text: text.ljust(widths[i]) if i == 0 else text.rjust(widths[i])  # noqa: E731
  text = ["  ".join(align(i, v) for i, v in enumerate(line)) for line in lines]
  text.insert(1, "─" * len(text[0]))
  if table.group_titles:
    text.insert(0, _group_titles(table, widths))
  marked = any(getattr(cell, "mark", "") for row in table.rows for cell in row)
  return "\n".join(text + ["* best   ≈ within noise of the best"] * marked)


def _group_titles(table, widths):
  """The line above the column names: each title centred over its columns."""
  parts, first = [], 0
  for title, count in table.groups:
    room = sum(widths[first : first + count]) + 2 * (count - 1)
    parts.append(f" {title} ".center(room, "─" if title else " ")[:room])
    first += count
  return "  ".join(parts)


def _rerank_lines(found, names):
  for label, part in (
    ("before", found["first_stage"]),
    (f"re-ranked {found['candidates']:,}", found),
  ):
    figures = "".join(f"{part['text_to_image'][n]:13.2f}" for n in names)
    yield f"{'text to image, ' + label:28}{part['pr_auc']:8.2f}{figures}"
  ece = found["calibration"]["reranked"]["ece"], found["calibration"]["first_stage"]["ece"]
  speed = found["pairs_per_second"]
  yield (
    f"  {found['loss']}, weight {found['weight']:g} chosen on {found['chosen_on']}; ceiling "
    f"{found['ceiling']:.2f}; ECE {ece[0]:.3f} (before {ece[1]:.3f}); "
    + (f"{speed:,.0f} pairs/s, " if speed else "")
    + f"{found['bytes_per_image']:,} bytes an image"
  )


def _index_line(found):
  near = ", ".join(f"{share:.1f} % of {k}" for k, share in found["neighbours_found"].items())
  drift = ", ".join(f"{n.replace('recall', 'R')} {x:+.2f}" for n, x in found["drift"].items())
  return (
    f"index: {found.get('built', found['kind'])}, {found['vectors']:,} vectors, "
    f"built in {found['build_seconds']:.1f} s, {found['queries_per_second']:,.0f} queries/s\n"
    f"  nearest found: {near}; drift it causes: {drift}"
  )


def _judgements_line(name, found):
  keys = ("kendall_tau_c", "kendall_tau_b", "spearman", "pr_auc")
  titles = ("Kendall τc", "τb", "Spearman", "PR-AUC")
  figures = [
    f"{title} {'–' if found[key] is None else format(found[key], '.2f')}"
    for title, key in zip(titles, keys, strict=True)
  ]
  return (
    f"{name}: {', '.join(figures)}\n"
    f"  over {found['pairs']:,} judged pairs; left out: {found['own_captions_left_out']:,} own "
    f"captions, {found['not_in_data_set']:,} not in the data set"
  )


def _relevance_line(name, found):
  return (
    f"{MEANING[name]} ({found['relevant_per_query']:.1f} a query): PR-AUC {found['pr_auc']:.2f}, "
    f"mAP@R {found['map_at_r']:.2f}, R-precision {found['r_precision']:.2f}"
  )


def _probability_lines(metrics):
  found = metrics["probabilities"]
  yield f"calibrated on {found['calibrated_on']}" + (": these very pairs" if found["seen"] else "")
  for gallery in found["galleries"]:
    for name, shown in gallery["relevance"].items():
      yield (
        f"  {name}, {gallery['images']:,} images: probabilities are off by {shown['ece']:.3f} "
        f"(ECE, first ten results), Brier score {shown['brier']:.3f}"
      )
  for row in metrics["promises"]:
    if row["kept"] is not None:
      bound = ", guaranteed" if row["guarantee"] else ""
      yield (
        f"  {row['relevance']}, {row['gallery']:,} images: precision {100 * row['target']:.0f} % "
        f"promised{bound}, {100 * row['kept']:.1f} % kept; {100 * row['returned']:.1f} % of the "
        "queries have results"
      )
