"""Orbax checkpoints: `model` is what evaluation needs, `training` the rest of the state.

Checkpoint n is the state after n steps. Batch n is a function of (seed, n), so the step is also
the position in the data. `run` is JSON: position, best step so far, config, and a checksum of
every array, by which damaged checkpoints are detected.
"""

import contextlib
import dataclasses
import time
from concurrent import futures

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from xe_retrieval.data import paths
from xe_retrieval.training import checkpoint_reader, processes
from xe_retrieval.training.checkpoint_reader import METRIC, Damaged, quality
from xe_retrieval.training.step import TrainState


class Checkpoints:
  """The checkpoints of a workdir, saved asynchronously and atomically.

  A single process copies the state to the host and leaves the rest to a thread. Several processes
  have to synchronise while saving, so only Orbax's writing runs in the background.
  """

  def __init__(
    self, workdir, keep: int = 3, keep_every: int = 0, read_only: bool = False, say=print
  ):
    self._workdir = paths.absolute(workdir)
    kept = [
      policies.LatestN(keep),
      policies.BestN(get_metric_fn=quality, n=1, keep_checkpoints_without_metrics=False),
    ]
    if keep_every:
      kept.append(policies.EveryNSteps(keep_every))
    self._options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(kept),
      best_fn=quality,  # without it, Orbax does not store the metrics
      cleanup_tmp_directories=not read_only,
      read_only=read_only,
    )
    self._say, self._failure = say, None
    self._thread, self._saving = futures.ThreadPoolExecutor(1, "checkpoint"), None
    if not read_only:
      with processes.primary_first("metrics of checkpoints"):
        for step in checkpoint_reader.damaged_metrics(workdir) if processes.is_primary() else []:
          self._say(f"WARNING: the metrics of checkpoint {step} of {self._workdir} are damaged")
          self._say(f"WARNING: it was moved to {self._move_aside(step)}")
    self._open()

  def latest(self) -> int | None:
    return self._manager.latest_step()

  def best(self) -> int | None:
    """The step with the best validation metric, or the latest if none was measured."""
    return checkpoint_reader.best_step(self._manager)

  def save(self, state: TrainState, metrics: dict | None = None, config: str = "") -> None:
    """`metrics` are those of the validation split, if they were measured at this step.

    A failure in the background (a full disk) is reported at the next save, which tries again.
    """
    step = int(state.step)
    self._settle()
    self._failure = None
    if step in self._manager.all_steps():
      return
    if jax.process_count() == 1:
      arguments = (step, _host_copy(_items(state)), metrics, config)
      self._saving = self._thread.submit(self._save, *arguments)
      return
    try:
      self._save(step, _items(state), metrics, config)
    except Exception as error:  # a bucket's client has types of its own
      self._failed(error)

  def resume(self, like: TrainState) -> TrainState | None:
    """The newest intact state; damaged checkpoints are reported and moved to workdir/damaged.

    Damaged is what fails a checksum. Whatever else goes wrong (memory, a network, a mount) raises
    and moves nothing.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return self.restore(step, like)
      except Damaged as error:
        self._say(f"WARNING: checkpoint {step} of {self._workdir} is damaged ({error})")
        self._say(f"WARNING: it was moved to {self._set_aside(step)}; trying the previous one")
    if steps:
      raise ValueError(
        f"all checkpoints {steps} of {self._workdir} are damaged; they were moved to "
        f"{self._workdir / 'damaged'}, and the same command starts from the beginning"
      )
    return None

  def restore(self, step: int, like: TrainState) -> TrainState:
    """The state of a checkpoint; `like` gives shapes, types and shardings.

    All processes return it, or all raise: Damaged, ValueError if it does not fit, else OSError.
    """
    restored, error = None, None
    try:
      restored = self._read(step, like)
    except Exception as e:  # Orbax and TensorStore raise many types
      error = e
    told = processes.exchange(f"checkpoint {step}", checkpoint_reader.verdict(error))
    failures = {kind: text for kind, _, text in (verdict.partition(": ") for verdict in told)}
    path = self._workdir / "checkpoints" / str(step)
    if "misfit" in failures:
      raise ValueError(f"checkpoint {step} of {self._workdir} {failures['misfit']}") from error
    if "failed" in failures:
      raise OSError(
        f"checkpoint {step} of {self._workdir} cannot be read ({failures['failed']}). Nothing was "
        f"moved: run the same command again, or remove {path} to go on from the one before it"
      ) from error
    if "damaged" in failures:
      raise Damaged(failures["damaged"]) from error
    parts = {**restored["model"], **restored["training"]}
    checkpoint_reader.verify(parts, restored["run"]["checksums"])
    if learning := parts.pop("learning", None):  # then `model` holds the moving averages
      parts |= learning | {"ema": {name: parts[name] for name in learning}}
    return TrainState(**parts)

  def _read(self, step, like):
    checkpoint_reader.verify_lists(self._workdir / "checkpoints" / str(step))
    model, training = jax.tree.map(ocp.utils.to_shape_dtype_struct, _items(like))
    run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
    if "checksums" not in run:
      raise checkpoint_reader.Misfit(
        "was written by an earlier version; resume it with that version"
      )
    self._check_shapes(step, model | training, run["checksums"])
    items = ocp.args.Composite(
      model=ocp.args.StandardRestore(model), training=ocp.args.StandardRestore(training)
    )
    restored = self._manager.restore(step, args=items)
    return {"model": restored["model"], "training": restored["training"], "run": run}

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def close(self) -> None:
    """Waits for pending saves; OSError if the last one failed."""
    self._settle()
    self._thread.shutdown()
    self._manager.close()
    if self._failure:
      raise OSError(self._failure)

  def _open(self):
    self._manager = checkpoint_reader.open_manager(self._workdir, self._options)

  def _save(self, step, items, metrics, config):
    model, training = items
    measured = checkpoint_reader.measured(self._manager)
    measured |= {step: quality(metrics)} if metrics else {}
    best = max(measured, key=measured.get, default=None)
    run = {
      "position": step,  # number of the next batch, from 0
      "best": None if best is None else {"step": best, METRIC: measured[best]},
      "metrics": metrics,
      "config": config,
      "checksums": checkpoint_reader.checksums(model | training),
    }
    items = ocp.args.Composite(
      model=ocp.args.StandardSave(model),
      training=ocp.args.StandardSave(training),
      run=ocp.args.JsonSave(run),
    )
    self._manager.save(step, args=items, metrics=metrics, force=True)

  def _settle(self):
    """Waits for the pending save and handles its failure."""
    saving, self._saving = self._saving, None
    try:
      if saving:
        saving.result()
      self._manager.wait_until_finished()
    except Exception as error:  # a bucket's client has types of its own
      self._failed(error)

  def _failed(self, error):
    """Removes partial files and reopens: a later save may succeed."""
    with contextlib.suppress(Exception):  # it raises the same error again
      self._manager.close()
    for _ in range(20):  # other writes may still be running for a moment
      time.sleep(0.1)
      partial = list((self._workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
      for directory in partial if processes.is_primary() else []:
        with contextlib.suppress(OSError):
          directory.rmtree()
    self._open()
    last = self.latest()
    kept = f"the last good one is step {last}" if last else "there is none yet"
    self._failure = f"a checkpoint could not be saved under {self._workdir}; {kept}"
    self._failure += f": {processes.line(error)}"
    self._say(f"WARNING: {self._failure}")

  def _set_aside(self, step):
    with processes.primary_first(f"damaged {step}"):
      if processes.is_primary():
        self._move_aside(step)
      self._manager.reload()
    return self._workdir / "damaged" / str(step)

  def _move_aside(self, step):
    target = self._workdir / "damaged" / str(step)
    if target.exists():
      target.rmtree()
    paths.move(self._workdir / "checkpoints" / str(step), target)
    return target

  def _check_shapes(self, step, like, written):
    """Before restoring: a mismatch means that the config changed, not that files are damaged."""
    metadata = self._manager.item_metadata(step)
    saved = checkpoint_reader.flat({**metadata["model"].tree, **metadata["training"].tree})
    wanted = checkpoint_reader.flat(like)
    if saved.keys() != written.keys():
      raise Damaged("the names of its arrays are not those that were written")
    for name in sorted(saved.keys() | wanted.keys()):
      a, b = (tuple(tree[name].shape) if name in tree else None for tree in (saved, wanted))
      if a != b:
        a, b = ("absent" if x is None else list(x) for x in (a, b))
        raise checkpoint_reader.Misfit(f"does not fit the config: {name} is {a} there and {b} here")


def _items(state):
  """State -> model, training; with moving averages, model holds these."""
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  model = {name: fields.pop(name) for name in ("params", "batch_stats")}
  if ema := fields.pop("ema"):
    fields["learning"], model = model, ema
  return model, fields


def _host_copy(tree):
  """Needed because the next step donates (overwrites) the arrays."""
  for x in jax.tree.leaves(tree):
    x.copy_to_host_async()
  return jax.tree.map(np.array, tree)
