"""Plans over topologies and batch sizes: one table, CSV and a plot."""

import csv
import dataclasses

from matplotlib import ticker
from matplotlib.figure import Figure

from xe_retrieval.planning import plans
from xe_retrieval.planning.plan_text import GIB
from xe_retrieval.report.plots import COLOURS, FAINT, INK

COLUMNS = {
  "topology": "{}",
  "chips": "{:,}",
  "batch": "{:,}",
  "micro_batch": "{:,}",
  "GiB/chip": "{:.2f}",
  "fits": "{}",
  "ms/step": "{:.4g}",
  "bound by": "{}",
  "pairs/s": "{:,.0f}",
  "MFU %": "{:.1f}",
  "hours": "{:.2f}",
  "loss %": "{:.2f}",
  "ms expected": "{:.4g}",
  "loss % expected": "{:.2f}",
}


@dataclasses.dataclass(frozen=True)
class Row:
  topology: str
  batch: int
  plan: plans.Plan | None
  error: str = ""  # if plan is None

  def values(self) -> dict:
    """{column: value} without unknown values."""
    out = {"topology": self.topology, "batch": self.batch}
    if self.plan is None:
      return out | {"fits": "error"}
    out |= {"chips": self.plan.topology.size, "micro_batch": self.plan.config["micro_batch"]}
    out["fits"] = "yes" if self.plan.fits else "no"
    if self.plan.used is not None:
      out["GiB/chip"] = self.plan.used / GIB
    if not (self.plan.counted and self.plan.fits):
      return out
    times, loss = self.plan.times, self.plan.parts["loss"]
    return out | {
      "ms/step": 1e3 * times.bound,
      "bound by": times.binding,
      "pairs/s": self.plan.pairs_per_second,
      "MFU %": 100 * self.plan.mfu,
      "hours": self.plan.hours,
      "loss %": 100 * loss.bound / times.bound,
      "ms expected": 1e3 * times.estimate,
      "loss % expected": 100 * loss.estimate / times.estimate,
    }


def table(rows) -> str:
  cells = [list(COLUMNS)] + [
    [form.format(v[name]) if (v := row.values()).get(name) is not None else "–"
     for name, form in COLUMNS.items()]
    for row in rows
  ]  # fmt: skip
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
  errors = [f"{row.topology}, batch {row.batch:,}: {row.error}" for row in rows if row.error]
  return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:], *errors])


def write(out, rows):
  """Writes out/sweep.csv and out/sweep.png."""
  out.mkdir(parents=True, exist_ok=True)
  with (out / "sweep.csv").open("w", newline="") as f:
    writer = csv.DictWriter(f, list(COLUMNS))
    writer.writeheader()
    writer.writerows(row.values() for row in rows)
  figure = plot(rows)
  figure.savefig(out / "sweep.png", dpi=150)
  return out / "sweep.csv", out / "sweep.png"


def plot(rows) -> Figure:
  """Pairs per second and memory per chip against chips; a line per batch size and kind of chip."""
  figure = Figure(figsize=(10, 4), layout="constrained")
  speed, memory = figure.subplots(1, 2)
  lines = {}
  for row in rows:
    if row.plan is not None:
      lines.setdefault((row.plan.topology.chip.name, row.batch), []).append(row.plan)
  several = len({chip for chip, _ in lines}) > 1
  for colour, ((chip, batch), made) in zip(COLOURS * 9, sorted(lines.items()), strict=False):
    label = f"batch {batch:,}" + (f", {chip}" if several else "")
    made = sorted(made, key=lambda plan: plan.topology.size)
    fitting = [p for p in made if p.fits and p.counted]
    style = dict(color=colour, marker="o", label=label)
    speed.plot([p.topology.size for p in fitting], [p.pairs_per_second for p in fitting], **style)
    known = [p for p in made if p.used is not None]
    memory.plot(
      [p.topology.size for p in known], [p.used / GIB for p in known], **style | {"label": None}
    )
    hollow = [p for p in known if not p.fits]
    memory.plot(
      [p.topology.size for p in hollow],
      [p.used / GIB for p in hollow],
      **dict(style, label=None, linestyle="", markerfacecolor="white", zorder=3),
    )
  for chip, limit in sorted({(p.topology.chip.name, p.limit) for m in lines.values() for p in m}):
    label = f"{limit / GIB:g} GiB of a {chip}; hollow: does not fit"
    memory.axhline(limit / GIB, color=INK, linestyle=":", linewidth=1, label=label)
  sizes = sorted({p.topology.size for m in lines.values() for p in m})
  for axes, title in ((speed, "Pairs per second, at most"), (memory, "Memory per chip (GiB)")):
    axes.set(xlabel="Chips", ylabel=title, xscale="log", yscale="log")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
      axis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(
      ticker.FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}")
    )
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
  return figure
