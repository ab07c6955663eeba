"""Reading checkpoints: the only part of training that a trained model needs."""

import hashlib
import json
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from xe_retrieval.data import paths
from xe_retrieval.training import processes

METRIC = "pr_auc"  # on the validation split; the best checkpoint has the highest


def open_manager(workdir, options) -> ocp.CheckpointManager:
  """Items: `model` (what evaluation needs), `training` (the rest of the state), `run` (JSON)."""
  handlers = {
    "model": _hashing(ocp.StandardCheckpointHandler(), "model"),
    "training": _hashing(ocp.StandardCheckpointHandler(), "training"),
    "run": _hashing(ocp.JsonCheckpointHandler(), "run"),
  }
  directory = paths.absolute(workdir) / "checkpoints"
  if damaged := damaged_metrics(workdir):
    raise ValueError(
      f"the metrics of checkpoints {damaged} of {workdir} are damaged; training moves them aside"
    )
  _silence_closed_event_loops()
  return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def _silence_closed_event_loops():
  """Orbax closes its event loop at the first array that cannot be read or written.

  Each of TensorStore's threads that calls it afterwards would print a traceback.
  """
  before = sys.unraisablehook
  if getattr(before, "silences", False):
    return

  def hook(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      before(unraisable)

  hook.silences = True
  sys.unraisablehook = hook


_LISTS = {"model": "_METADATA", "training": "_METADATA", "run": "metadata"}
_HASH = "sha256"


def _hashing(handler, item):
  """The handler, which also writes a hash of its JSON: TensorStore has checksums of arrays only."""
  finalize = handler.finalize

  def finalize_and_hash(directory):  # before the checkpoint gets its final name
    finalize(directory)
    (directory / _HASH).write_bytes(_hash(directory / _LISTS[item]))

  handler.finalize = finalize_and_hash
  return handler


def _hash(path):
  return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def verify_lists(directory, items=tuple(_LISTS)) -> None:
  """Damaged, if JSON of a checkpoint is not what was written, though it may be valid JSON."""
  for item in items:
    known = directory / item / _HASH
    if known.exists() and known.read_bytes() != _hash(directory / item / _LISTS[item]):
      raise Damaged(f"{item}/{_LISTS[item]} is not what was written")  # earlier versions: no hash


def damaged_metrics(workdir) -> list[int]:
  """The steps of checkpoints whose metrics are not those that were written.

  If they cannot be parsed, Orbax opens none of the checkpoints.
  """
  directory, found = paths.absolute(workdir) / "checkpoints", []
  for step in directory.iterdir() if directory.exists() else []:
    file = step / "metrics" / "metrics"
    if step.name.isdecimal() and file.exists():
      metrics, run = _parsed(file), _parsed(step / "run" / _LISTS["run"]) or {}
      damaged = metrics is None or run.get("metrics") not in (None, metrics)
      if damaged and file.exists():  # else it is just being deleted
        found.append(int(step.name))
  return found


def _parsed(path):
  """None, if it is not there or is not JSON."""
  try:
    return json.loads(path.read_bytes())
  except (FileNotFoundError, ValueError):  # the latter also of bytes that are no text
    return None


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


def read_model(workdir, which: str, like: dict, sharding) -> tuple[int, dict, dict]:
  """The best or latest checkpoint -> its step, {"params", "batch_stats"} shaped as `like`, and
  what the loss has learned: {"log_scale": …, "bias": …}, or {}.
  """
  options = ocp.CheckpointManagerOptions(
    best_fn=quality, read_only=True, cleanup_tmp_directories=False
  )
  with open_manager(workdir, options) as manager:
    step = manager.latest_step() if which == "latest" else best_step(manager)
    if step is None:
      raise ValueError(f"{workdir} holds no finished checkpoint yet")
    try:
      model = _read_model(manager, step, like, sharding)
    except Exception as error:  # Orbax and TensorStore raise many types
      kind, _, text = verdict(error).partition(": ")
      how = "is damaged" if kind == "damaged" else "cannot be read"
      raise ValueError(f"checkpoint {step} of {workdir} {how} ({text})") from error
    return step, model, jax.device_get(model["params"].pop("loss", {}))


def _read_model(manager, step, like, sharding):
  verify_lists(manager.directory / str(step), ("model", "run"))
  wanted = {name: dict(like.get(name, {})) for name in ("params", "batch_stats")}
  saved = manager.item_metadata(step)["model"].tree["params"]
  wanted["params"] |= {"loss": saved["loss"]} if "loss" in saved else {}
  wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), wanted)
  items = ocp.args.Composite(model=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore())
  restored = manager.restore(step, args=items)
  if known := restored["run"].get("checksums"):  # earlier versions wrote none
    verify(restored["model"], known)
  return restored["model"]


class Damaged(Exception):
  """A checksum does not match: ours, or one of TensorStore."""


class Misfit(ValueError):
  """The checkpoint is intact but does not belong to this config or version."""


# What TensorStore and zstd say of bytes that were read but are not those that were written, or
# fewer. Failures to read them (not found, unavailable, permission denied) have other words.
_DAMAGE = ("data_loss", "checksum", "corruption", "decompress", "error decoding", "out_of_range")


def verdict(error: Exception | None) -> str:
  """An exception while reading as `kind: text`, "" without one: misfit, damaged or failed."""
  if error is None:
    return ""
  chain = [error]  # Orbax wraps what TensorStore says
  while cause := chain[-1].__cause__ or chain[-1].__context__:
    chain.append(cause)
  damaged = any(
    isinstance(e, Damaged | json.JSONDecodeError | UnicodeDecodeError)
    or any(sign in str(e).lower() for sign in _DAMAGE)
    for e in chain
  )
  kind = "misfit" if isinstance(error, Misfit) else "damaged" if damaged else "failed"
  return f"{kind}: {processes.line(error)}"


def checksums(tree) -> dict[str, int]:
  """{name: uint32}; sensitive to every bit of an array, independent of its sharding.

  On the host, so that the first save, perhaps under preemption, does not have to compile.
  """
  arrays = flat(tree)
  sums = np.array([_checksum(x) for x in arrays.values()], np.uint32)  # of local shards
  if jax.process_count() > 1:
    sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
  return dict(zip(arrays, sums.tolist(), strict=True))


def _checksum(x):
  if isinstance(x, np.ndarray):
    return _weighted(x, x.shape, [slice(None)] * x.ndim)
  shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
  return sum(_weighted(np.asarray(s.data), x.shape, s.index) for s in shards) % 2**32


def _weighted(part, shape, index) -> int:
  """Sum of the elements' bits, each weighted by an odd number unique to its global position."""
  place = np.zeros([], np.uint32)
  for whole, here, size in zip(shape, index, part.shape, strict=True):
    start = here.start or 0
    place = place[..., None] * np.uint32(whole) + np.arange(start, start + size, dtype=np.uint32)
  place *= 2
  place += 1
  place *= part.view(f"uint{8 * part.dtype.itemsize}")
  return int(place.sum(dtype=np.uint32))


def verify(tree, expected: dict[str, int]) -> None:
  """Damaged, if an array is not the one of which `checksums` were taken."""
  for name, value in checksums(tree).items():
    if expected.get(name) != value:
      raise Damaged(f"the checksum of {name} does not match")


def flat(tree) -> dict:
  """{"params.text.tower…": leaf}, the same names for optax's named tuples and Orbax's dicts."""

  def name(key):
    return str(next(getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)))

  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {".".join(map(name, path)): leaf for path, leaf in leaves}
