"""Orbax checkpoints: what evaluation needs (`model`) apart from what only training needs.

Checkpoint n is the state after n steps. Batch n is a function of (seed, n), so the step is also
the position in the data.
"""

import dataclasses

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from xe_retrieval.training.step import TrainState

BEST = "pr_auc"  # of the validation split


class Checkpoints:
  """The checkpoints of a workdir; saving goes on in the background, and is all or nothing."""

  def __init__(self, workdir, keep: int = 3):
    best = policies.BestN(get_metric_fn=_quality, n=1, keep_checkpoints_without_metrics=False)
    self._manager = ocp.CheckpointManager(
      epath.Path(workdir).resolve() / "checkpoints",
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        cleanup_tmp_directories=True,
      ),
      item_names=("model", "training"),
    )

  def latest(self) -> int | None:
    return self._manager.latest_step()

  def best(self) -> int | None:
    """The step with the best validation metric, or the latest if none was measured."""
    measured = {s: self._manager.metrics(s) for s in self._manager.all_steps()}
    measured = {s: _quality(m) for s, m in measured.items() if m}
    return max(measured, key=measured.get) if measured else self.latest()

  def save(self, state: TrainState, metrics: dict | None = None) -> None:
    """`metrics` are those of the validation split, if they were measured at this very step."""
    step = int(state.step)
    if step in self._manager.all_steps():
      return
    model, training = _items(state)
    items = ocp.args.Composite(
      model=ocp.args.StandardSave(model), training=ocp.args.StandardSave(training)
    )
    self._manager.save(step, args=items, metrics=metrics, force=True)

  def restore(self, step: int, like: TrainState) -> TrainState:
    """The whole state; `like` gives shapes, types and shardings."""
    model, training = jax.tree.map(ocp.utils.to_shape_dtype_struct, _items(like))
    items = ocp.args.Composite(
      model=ocp.args.StandardRestore(model), training=ocp.args.StandardRestore(training)
    )
    restored = self._manager.restore(step, args=items)
    return TrainState(**restored["model"], **restored["training"])

  def restore_model(self, step: int, like: dict) -> dict:
    """{"params", "batch_stats"} only; `like` gives shapes, types and shardings."""
    items = ocp.args.Composite(model=ocp.args.StandardRestore(like))
    return self._manager.restore(step, args=items)["model"]

  def close(self) -> None:
    """Waits for saves under way."""
    self._manager.wait_until_finished()
    self._manager.close()


def _quality(metrics):
  return metrics[BEST]


def _items(state):
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  model = {name: fields.pop(name) for name in ("params", "batch_stats")}
  return model, fields
