"""`main --dry_run`: model sizes, memory of a step, epochs and learning rates, without training."""

import jax
import numpy as np
from matplotlib.figure import Figure

from xe_retrieval.data import paths
from xe_retrieval.training import optimizers, step


def describe(config, workdir, source, mesh) -> str:
  """-> several lines of text; writes workdir/schedules.png."""
  built = step.build(config, mesh)
  per_epoch = len(source) // config.batch_size
  epochs = config.steps / per_epoch if per_epoch else float("inf")
  lines = [
    f"{config.loss} on {config.data.name}: {len(source):,} images, {per_epoch:,} batches of "
    f"{config.batch_size} per epoch, {config.steps:,} steps = {epochs:.1f} epochs",
    *_towers(config, built.state),
    _memory(built, mesh),
    f"learning rates: {_plot(config, paths.absolute(workdir))}",
  ]
  return "\n".join(lines)


def _towers(config, state):
  labels = optimizers.labels(config, state.params)
  for tower in ("text", "image"):
    pairs = zip(jax.tree.leaves(state.params[tower]), jax.tree.leaves(labels[tower]), strict=True)
    sizes = {"learn": 0, "frozen": 0}
    for leaf, label in pairs:
      sizes["frozen" if label == "frozen" else "learn"] += leaf.size
    c = config[tower]
    yield (
      f"{tower:5} {sum(sizes.values()):>13,} parameters: {sizes['learn']:,} learn by {c.optimizer} "
      f"(learning rate {c.learning_rate:g} → {c.end_learning_rate:g}, {c.warmup_steps:,} steps of "
      f"warm-up, weight decay {c.weight_decay:g}), {sizes['frozen']:,} frozen"
    )
  moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))
  yield f"optimiser states: {_size(moments)}"


def _memory(built, mesh):
  memory = built.lower().compile().memory_analysis()
  device = mesh.devices.flat[0].platform
  if memory is None:
    return f"memory of a step: unknown to the {device} backend"
  parts = {
    "state and batch": memory.argument_size_in_bytes,
    "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
  }
  return (
    f"memory of a step on each of {mesh.size} {device} device(s): {_size(sum(parts.values()))} ("
    + ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
    + ")"
  )


def _plot(config, workdir):
  steps = np.unique(np.linspace(0, config.steps, 1_000).astype(int))
  figure = Figure(figsize=(6, 3), layout="constrained")
  axes = figure.subplots()
  for tower, colour in (("text", "C0"), ("image", "C1")):
    rates = jax.vmap(optimizers.schedule(config[tower], config.steps))(steps)
    axes.plot(steps, rates, color=colour, label=f"{tower} ({config[tower].optimizer})")
  axes.set(xlabel="step", ylabel="learning rate", xlim=(0, config.steps))
  axes.set_yscale("symlog", linthresh=1e-5) if _far_apart(config) else axes.set_ylim(bottom=0)
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  path = workdir / "schedules.png"
  workdir.mkdir(parents=True, exist_ok=True)
  with path.open("wb") as f:
    figure.savefig(f, dpi=120, format="png")
  return path


def _far_apart(config):
  """True if the lower learning rate would look flat on a linear axis."""
  rates = [config[tower].learning_rate for tower in ("text", "image")]
  return min(rates) > 0 and max(rates) > 10 * min(rates)


def _size(count):
  return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
