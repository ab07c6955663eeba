"""Reading checkpoints: the only part of training that a trained model needs."""

import jax
import orbax.checkpoint as ocp

from xe_retrieval.data import paths
from xe_retrieval.training import processes

METRIC = "pr_auc"  # on the validation split; the best checkpoint has the highest


def open_manager(workdir, options) -> ocp.CheckpointManager:
  """Items: `model` (what evaluation needs), `training` (the rest of the state), `run` (JSON)."""
  handlers = {
    "model": ocp.StandardCheckpointHandler(),
    "training": ocp.StandardCheckpointHandler(),
    "run": ocp.JsonCheckpointHandler(),
  }
  directory = paths.absolute(workdir) / "checkpoints"
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
  """The best or latest checkpoint -> its step and {"params", "batch_stats"}, shaped as `like`.

  What the loss has learned is left out: Orbax restores whole items, so it is read and dropped.
  """
  options = ocp.CheckpointManagerOptions(
    best_fn=quality, read_only=True, cleanup_tmp_directories=False
  )
  with open_manager(workdir, options) as manager:
    step = manager.latest_step() if which == "latest" else best_step(manager)
    if step is None:
      raise ValueError(f"{workdir} holds no finished checkpoint yet")
    wanted = {name: dict(like.get(name, {})) for name in ("params", "batch_stats")}
    saved = manager.item_metadata(step)["model"].tree["params"]
    wanted["params"] |= {"loss": saved["loss"]} if "loss" in saved else {}
    wanted = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), wanted
    )
    items = ocp.args.Composite(model=ocp.args.StandardRestore(wanted))
    model = manager.restore(step, args=items)["model"]
    model["params"].pop("loss", None)
    return step, model


# What TensorStore and zstd say of bytes that were read but are not those that were written.
# Failures to read them (not found, unavailable, out of range) have other words.
_DAMAGE = ("data_loss", "checksum", "corruption", "decompress", "error decoding")


class Misfit(ValueError):
  """The checkpoint is intact but does not belong to this config or version."""


def verdict(error: Exception | None) -> str:
  """An exception while reading as `kind: text`, "" without one: misfit, damaged or failed."""
  if error is None:
    return ""
  told, cause = [], error  # Orbax wraps what TensorStore says
  while cause is not None:
    told.append(str(cause))
    cause = cause.__cause__ or cause.__context__
  damaged = any(sign in text.lower() for text in told for sign in _DAMAGE)
  kind = "misfit" if isinstance(error, Misfit) else "damaged" if damaged else "failed"
  return f"{kind}: {processes.line(error)}"
