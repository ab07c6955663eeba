"""Reading checkpoints: the only part of training that a trained model needs."""

import jax
import orbax.checkpoint as ocp
from etils import epath

METRIC = "pr_auc"  # on the validation split; the best checkpoint has the highest


def open_manager(workdir, options) -> ocp.CheckpointManager:
  """Items: `model` (what evaluation needs), `training` (the rest of the state), `run` (JSON)."""
  handlers = {
    "model": ocp.StandardCheckpointHandler(),
    "training": ocp.StandardCheckpointHandler(),
    "run": ocp.JsonCheckpointHandler(),
  }
  directory = epath.Path(workdir).resolve() / "checkpoints"
  return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def quality(metrics: dict) -> float:
  return metrics[METRIC]


def measured(manager) -> dict[int, float]:
  """{step: validation metric} of the checkpoints that have one."""
  metrics = {step: manager.metrics(step) for step in manager.all_steps()}
  return {step: quality(m) for step, m in metrics.items() if m}


def best_step(manager) -> int | None:
  """The step with the best validation metric, or the latest if none was measured."""
  known = measured(manager)
  return max(known, key=known.get) if known else manager.latest_step()


def read_model(workdir, which: str, like: dict, sharding) -> tuple[int, dict]:
  """The best or latest checkpoint -> its step and {"params", "batch_stats"}, shaped as `like`."""
  options = ocp.CheckpointManagerOptions(
    best_fn=quality, read_only=True, cleanup_tmp_directories=False
  )
  with open_manager(workdir, options) as manager:
    step = manager.latest_step() if which == "latest" else best_step(manager)
    if step is None:
      raise ValueError(f"{workdir} holds no finished checkpoint yet")
    wanted = {
      name: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like.get(name, {})
      )
      for name in ("params", "batch_stats")
    }
    items = ocp.args.Composite(model=ocp.args.StandardRestore(wanted))
    return step, manager.restore(step, args=items)["model"]
