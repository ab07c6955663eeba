"""A plan as text for a terminal and as a dict for JSON."""

from xe_retrieval.planning import costs, roofline

GIB = 2**30


def describe(plan, only="step") -> str:
  """-> several lines."""
  chip, config, n = plan.topology.chip, plan.config, plan.topology.size
  what = config["loss"] + (" alone" if only == "loss" else "")
  head = (
    f"{what}, batch {config['batch_size']:,} on {n} × {chip.name} ({plan.topology.name}), "
    f"{config['batch_size'] / n:g} pairs per chip, {config['dtype']}"
    + (f", micro_batch {config['micro_batch']:,}" if config["micro_batch"] else "")
    + (", remat" if config["remat"] else "")
    + (", sharded parameters" if config["mesh"]["shard_parameters"] else "")
    + f", {config['loss_implementation']} loss"
  )
  lines = [head, "", *_memory(plan)]
  if plan.counted:
    lines += ["", *_parts(plan), "", *_collectives(plan), "", *_bound(plan, only)]
  return "\n".join(lines)


def verdict(plan) -> str:
  limit = f"{plan.limit / GIB:g} GiB"
  if plan.used is None:
    return f"does not fit into {limit}"
  used = size(plan.used)
  return f"{used} of {limit}: " + ("fits" if plan.fits else "does not fit")


def remedy(tried) -> str:
  """One line about a remedy that was tried."""
  speed = ""
  if tried.plan.counted and tried.plan.fits:
    speed = f", at most {tried.plan.pairs_per_second:,.0f} pairs/s"
  return f"  {tried.flag:40} {verdict(tried.plan)}{speed}"


def size(count) -> str:
  for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= scale:
      return f"{count / scale:.2f} {unit}"
  return f"{count:.0f} B"


def to_dict(plan) -> dict:
  """The figures of describe() in bytes and seconds."""
  out = {
    "config": plan.config,
    "topology": plan.topology.name,
    "chips": plan.topology.size,
    "fits": plan.fits,
    "limit_bytes": plan.limit,
    "used_bytes": plan.used,
    "memory": {name: value for name, value in plan.memory.items() if name != "fits"},
  }
  if not plan.counted:
    return out
  return out | {
    "step": _figures(plan.counted.total, plan.times),
    "parts": {n: _figures(c, plan.parts[n]) for n, c in plan.counted.parts.items()},
    "assumed_trips": plan.counted.assumed,
    "bound": {
      "seconds": plan.times.bound,
      "by": plan.times.binding,
      "pairs_per_second": plan.pairs_per_second,
      "mfu": plan.mfu,
      "hours": plan.hours,
    },
    "estimate_seconds": plan.times.estimate,
    "left_out": roofline.LEFT_OUT,
    "source_of_peaks": plan.topology.chip.source,
  }


def _figures(cost, times):
  kinds = {kind: {"count": count, "bytes": 0} for kind, count in cost.calls.items()}
  for (kind, n, _), count in cost.collectives.items():
    kinds.setdefault(kind, {"count": 0, "bytes": 0})["bytes"] += count * n
  return {
    "flops": cost.flops,
    "matrix_unit_flops": cost.passes,
    "hbm_bytes": cost.bytes,
    "collectives": kinds,
    "seconds": {
      "compute": times.compute,
      "memory": times.memory,
      "interconnect": times.interconnect,
      "compiler_schedule": times.scheduled,
    },
  }


def _memory(plan):
  memory = plan.memory
  named = {"parameters": "parameters", "optimiser": "optimiser state", "batch": "batch"}
  rows = [(title, memory[name]) for name, title in named.items() if memory[name]]
  if "temporaries" in memory:
    rest = memory["arguments"] - sum(value for _, value in rows)
    rows += [("outputs", memory["results"]), ("temporaries", memory["temporaries"])]
    rows += [("program, constants", memory["program"] + max(rest, 0))]
  lines = [f"  {title:22}{size(value):>12}" for title, value in rows]
  lines = ["memory per chip", *lines, f"  {'total':22}{verdict(plan)}"]
  if plan.counted and plan.topology.chip.name != "cpu" and not plan.times.scheduled:
    lines.append("  (machine code, 0.3 GiB for the paper's towers, comes on top: --machine_code)")
  return lines


def _parts(plan):
  yield (
    f"{'per chip and step':18}{'FLOP':>9}{'in passes':>11}{'HBM':>12}{'links':>12}"
    f"{'compute':>13}{'memory':>13}{'links':>13}  {'bound by':14}share"
  )
  rows = [*plan.counted.parts.items(), ("whole step", plan.counted.total)]
  for name, cost in rows:
    times = plan.times if name == "whole step" else plan.parts[name]
    if not (cost.bytes or cost.collectives):
      continue
    sent = sum(count * n for (_, n, _), count in cost.collectives.items())
    yield (
      f"{name:18}{_flops(cost.flops):>9}{_flops(cost.passes):>11}{size(cost.bytes):>12}"
      f"{size(sent):>12}{_ms(times.compute)}{_ms(times.memory)}{_ms(times.interconnect)}"
      f"  {times.binding:14}{100 * times.bound / plan.times.bound:5.1f} %"
    )


def _flops(count):
  for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
    if count >= scale:
      return f"{count / scale:.2f} {unit}"
  return f"{count:.0f}"


def _ms(seconds):
  return f"{1e3 * seconds:>10.3f} ms"


def _collectives(plan):
  kinds = _figures(plan.counted.total, plan.times)["collectives"]
  yield "collectives per step " + (
    ", ".join(
      f"{kinds[kind]['count']} {kind} ({size(kinds[kind]['bytes'])})"
      for kind in costs.COLLECTIVES
      if kind in kinds
    )
    or "none"
  )


def _bound(plan, only):
  chip, times = plan.topology.chip, plan.times
  line = f"at most {plan.pairs_per_second:,.0f} pairs/s: {1e3 * times.bound:.3g} ms per step"
  line += f", bound by {times.binding}"
  if only == "step":
    line += (
      f"; MFU at most {100 * plan.mfu:.1f} %, {plan.config['steps']:,} steps in at least "
      f"{plan.hours:.2f} h"
    )
  yield line
  if times.scheduled:
    yield (
      f"the compiler estimates {1e3 * times.scheduled:.3g} ms for its schedule, without "
      f"interconnect; with it {1e3 * times.estimate:.3g} ms, "
      f"{plan.config['batch_size'] / times.estimate:,.0f} pairs/s"
    )
  if plan.counted.assumed:
    loops = ", ".join(f"{name} {n}" for name, n in plan.counted.assumed.items())
    yield f"trip counts of loops that depend on the scores, as measured: {loops}"
  if plan.counted.unknown:
    yield f"{plan.counted.unknown} loop(s) of unknown trip count are counted once"
  yield roofline.LEFT_OUT
  yield (
    "passes: float32 at full precision takes six passes of the bfloat16 matrix unit; share: the "
    "part's bound / the step's bound"
  )
  yield (
    f"peaks: {chip.flops / 1e12:g} TFLOP/s (bfloat16), {chip.bandwidth / 1e9:g} GB/s of HBM, "
    f"{plan.topology.links} × {chip.link / 1e9:g} GB/s of links, {chip.source}"
  )
