"""Orbax checkpoints: what evaluation needs (`model`) apart from what only training needs.

Checkpoint n is the state after n steps. Batch n is a function of (seed, n), so the step is also
the position in the data. `run` is JSON: position, best so far, config, and a checksum of every
array, by which a damaged checkpoint is told from a whole one.
"""

import contextlib
import dataclasses
import shutil
import time
from concurrent import futures

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from xe_retrieval.training import processes
from xe_retrieval.training.step import TrainState

BEST = "pr_auc"  # of the validation split


class Checkpoints:
  """The checkpoints of a workdir; saving goes on in the background, and is all or nothing.

  One process leaves everything but a copy of the state to a thread. Several have to agree as they
  save: there only the writing itself is in the background, by Orbax.
  """

  def __init__(
    self, workdir, keep: int = 3, keep_every: int = 0, read_only: bool = False, say=print
  ):
    self._workdir = epath.Path(workdir).resolve()
    kept = [
      policies.LatestN(keep),
      policies.BestN(get_metric_fn=_quality, n=1, keep_checkpoints_without_metrics=False),
    ]
    if keep_every:
      kept.append(policies.EveryNSteps(keep_every))
    self._options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(kept),
      best_fn=_quality,  # without it, Orbax does not even write the metrics down
      cleanup_tmp_directories=not read_only,
      read_only=read_only,
    )
    self._say, self._failure = say, None
    self._thread, self._saving = futures.ThreadPoolExecutor(1, "checkpoint"), None
    self._open()

  def latest(self) -> int | None:
    return self._manager.latest_step()

  def best(self) -> int | None:
    """The step with the best validation metric, or the latest if none was measured."""
    measured = self._measured()
    return max(measured, key=measured.get) if measured else self.latest()

  def save(self, state: TrainState, metrics: dict | None = None, config: str = "") -> None:
    """`metrics` are those of the validation split, if they were measured at this very step.

    What fails in the background (a full disk) is said at the next save, which tries again.
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
    except (OSError, ValueError, RuntimeError) as error:
      self._failed(error)

  def resume(self, like: TrainState) -> TrainState | None:
    """The newest state that is whole; damaged ones are said, and moved to workdir/damaged."""
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return self.restore(step, like)
      except _Misfit as error:
        raise ValueError(f"checkpoint {step} of {self._workdir} {error}") from error
      except Exception as error:  # whatever Orbax and TensorStore make of a damaged file
        self._say(f"WARNING: checkpoint {step} of {self._workdir} is damaged ({_line(error)})")
        self._say(f"WARNING: it was moved to {self._set_aside(step)}; trying the one before")
    if steps:
      raise ValueError(
        f"none of the checkpoints {steps} of {self._workdir} is whole; they are in "
        f"{self._workdir / 'damaged'} now, and the same command starts from the beginning"
      )
    return None

  def restore(self, step: int, like: TrainState) -> TrainState:
    """The whole state; `like` gives shapes, types and shardings."""
    model, training = jax.tree.map(ocp.utils.to_shape_dtype_struct, _items(like))
    self._fits(step, model | training)
    items = ocp.args.Composite(
      model=ocp.args.StandardRestore(model),
      training=ocp.args.StandardRestore(training),
      run=ocp.args.JsonRestore(),
    )
    restored = self._manager.restore(step, args=items)
    parts = {**restored["model"], **restored["training"]}
    if "checksums" not in restored["run"]:
      raise _Misfit("is from an earlier version, which is needed to go on from it")
    _verify(parts, restored["run"]["checksums"])
    ema = parts.pop("learning", None)  # then `params` are their running mean
    return TrainState(**parts | ({"params": ema, "ema": parts["params"]} if ema else {}))

  def restore_model(self, step: int, like: dict) -> dict:
    """{"params", "batch_stats"} only; `like` gives shapes, types and shardings."""
    items = ocp.args.Composite(model=ocp.args.StandardRestore(like))
    return self._manager.restore(step, args=items)["model"]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def close(self) -> None:
    """Waits for saves under way; OSError if the last one failed."""
    self._settle()
    self._thread.shutdown()
    self._manager.close()
    if self._failure:
      raise OSError(self._failure)

  def _open(self):
    handlers = {
      "model": ocp.StandardCheckpointHandler(),
      "training": ocp.StandardCheckpointHandler(),
      "run": ocp.JsonCheckpointHandler(),
    }
    self._manager = ocp.CheckpointManager(
      self._workdir / "checkpoints", options=self._options, item_handlers=handlers
    )

  def _save(self, step, items, metrics, config):
    model, training = items
    measured = self._measured() | ({step: _quality(metrics)} if metrics else {})
    best = max(measured, key=measured.get, default=None)
    run = {
      "position": step,  # in the data: the number of the next batch, counted from 0
      "best": None if best is None else {"step": best, BEST: measured[best]},
      "config": config,
      "checksums": _checksums(model | training),
    }
    items = ocp.args.Composite(
      model=ocp.args.StandardSave(model),
      training=ocp.args.StandardSave(training),
      run=ocp.args.JsonSave(run),
    )
    self._manager.save(step, args=items, metrics=metrics, force=True)

  def _settle(self):
    """Waits for the save under way, and sees how it went."""
    saving, self._saving = self._saving, None
    try:
      if saving:
        saving.result()
      self._manager.wait_until_finished()
    except (OSError, ValueError, RuntimeError) as error:
      self._failed(error)

  def _failed(self, error):
    """Makes room again and goes on: what has been trained may still be saved later."""
    with contextlib.suppress(Exception):  # it says the same once more
      self._manager.close()
    for _ in range(20):  # writes that did not fail may go on for a moment
      time.sleep(0.1)
      left = list((self._workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
      for half in left if processes.first() else []:
        shutil.rmtree(half, ignore_errors=True)
    self._open()
    last = self.latest()
    kept = f"the last whole one is of step {last}" if last else "there is none yet"
    self._failure = f"a checkpoint could not be saved under {self._workdir}; {kept}: {_line(error)}"
    self._say(f"WARNING: {self._failure}")

  def _measured(self):
    """{step: validation metric} of the checkpoints that have one."""
    metrics = {s: self._manager.metrics(s) for s in self._manager.all_steps()}
    return {s: _quality(m) for s, m in metrics.items() if m}

  def _set_aside(self, step):
    target = self._workdir / "damaged" / str(step)
    if processes.first():
      target.parent.mkdir(exist_ok=True)
      if target.exists():
        target.rmtree()
      (self._workdir / "checkpoints" / str(step)).rename(target)
    with processes.one_after_the_other(f"damaged {step}"):
      self._manager.reload()
    return target

  def _fits(self, step, like):
    """Shapes first: a config that became another is no damage."""
    metadata = self._manager.item_metadata(step)
    there = _flat({**metadata["model"].tree, **metadata["training"].tree})
    here = _flat(like)
    for name in sorted(there.keys() | here.keys()):
      a, b = (tuple(tree[name].shape) if name in tree else None for tree in (there, here))
      if a != b:
        a, b = ("absent" if x is None else list(x) for x in (a, b))
        raise _Misfit(f"does not fit the config: {name} is {a} there and {b} here")


class _Misfit(ValueError):
  pass


def _quality(metrics):
  return metrics[BEST]


def _items(state):
  """What evaluation takes (with a running mean of the parameters, this) and the rest."""
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  if ema := fields.pop("ema"):
    fields["learning"], fields["params"] = fields["params"], ema
  model = {name: fields.pop(name) for name in ("params", "batch_stats")}
  return model, fields


def _host_copy(tree):
  """The step that follows may overwrite the arrays."""
  for x in jax.tree.leaves(tree):
    x.copy_to_host_async()
  return jax.tree.map(np.array, tree)


def _checksums(tree):
  """{name: uint32}, another if any bit of the array is; the same in any sharding.

  On the host: a first save, perhaps that of a machine about to be taken away, compiles nothing.
  """
  arrays = _flat(tree)
  sums = np.array([_checksum(x) for x in arrays.values()], np.uint32)  # of what lies here
  if jax.process_count() > 1:
    sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
  return dict(zip(arrays, sums.tolist(), strict=True))


def _checksum(x):
  if isinstance(x, np.ndarray):
    return _weighted(x, x.shape, [slice(None)] * x.ndim)
  shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
  return sum(_weighted(np.asarray(s.data), x.shape, s.index) for s in shards) % 2**32


def _weighted(part, shape, index) -> int:
  """Sum of bits, each element's times an odd number that tells its place in the whole array."""
  place = np.zeros([], np.uint32)
  for whole, here, size in zip(shape, index, part.shape, strict=True):
    start = here.start or 0
    place = place[..., None] * np.uint32(whole) + np.arange(start, start + size, dtype=np.uint32)
  place *= 2
  place += 1
  place *= part.view(f"uint{8 * part.dtype.itemsize}")
  return int(place.sum(dtype=np.uint32))


def _verify(tree, expected):
  for name, value in _checksums(tree).items():
    if expected.get(name) != value:
      raise OSError(f"{name} is not what was saved")


def _flat(tree):
  """{"params.text.tower…": leaf}; Orbax gives optax's named tuples back as dicts, this as both."""

  def name(key):
    return str(next(getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)))

  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {".".join(map(name, path)): leaf for path, leaf in leaves}


def _line(error):
  return " ".join(str(error).split())[:300] or type(error).__name__
