"""A run as one process or several: joining, waiting, sharing work, stopping together."""

import collections
import contextlib
import itertools
import os
import signal
import sys
import time
import traceback

import jax
import numpy as np
from jax._src import distributed  # its key-value store has no public name
from jax.experimental import multihost_utils
from tqdm import tqdm

from xe_retrieval.data import mesh as mesh_lib

TIMEOUT = 24 * 3600  # seconds: process 0 may compute features or prepare data for hours


def join(cluster: bool = False) -> None:
  """Initialises jax.distributed if there are several processes; call before using a device.

  launch/local_processes.sh and launch/kubernetes.yaml set JAX_COORDINATOR_ADDRESS,
  JAX_NUM_PROCESSES and JAX_PROCESS_ID. With `cluster`, JAX asks SLURM or the TPU pod instead.
  """
  count = int(os.environ.get("JAX_NUM_PROCESSES", 1))
  virtual = jax.config.jax_num_cpu_devices > 1 or "device_count" in os.environ.get("XLA_FLAGS", "")
  if count > 1 or virtual:
    # CPU collectives block a thread of XLA's pool, which has one per core: concurrent programs can
    # deadlock and abort. Hence more threads, and one program at a time.
    os.environ.setdefault("NPROC", "32")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address, index = os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(address, count, index, shutdown_timeout_seconds=TIMEOUT)
  elif cluster:
    jax.distributed.initialize(shutdown_timeout_seconds=TIMEOUT)


@contextlib.contextmanager
def together(cluster: bool = False):
  """`join`s for the block. If it raises, or exits with a message, this process ends at once.

  Otherwise JAX would let it wait for the others to finish, and these may be waiting for it. Exit
  codes that are numbers are those on which all agree, like that of a run that was stopped.
  """
  join(cluster)
  try:
    yield
  except BaseException as error:
    exits = isinstance(error, SystemExit)
    if jax.process_count() == 1 or (exits and not isinstance(error.code, str)):
      raise
    try:
      print(error.code if exits else traceback.format_exc(), file=sys.stderr, flush=True)
      sys.stdout.flush()
      if is_primary():
        time.sleep(1)  # the coordinator: others cannot say why they fail when it is gone
    finally:  # also if nobody reads what it prints
      os._exit(1)


def is_primary() -> bool:
  """True in process 0, which alone writes files and prints."""
  return jax.process_index() == 0


@contextlib.contextmanager
def primary_first(name: str):
  """Process 0 runs the block before the others do, which then find its files on disk.

  If it raises there, it raises in all: ValueError, with what process 0 said.
  """
  if jax.process_count() == 1:
    yield
    return
  board = _Board(name)
  if not is_primary():
    if failure := board.read(0):
      raise ValueError(f"process 0 failed: {failure}")
    yield
    return
  try:
    yield
  except BaseException as error:
    board.write(line(error))
    raise
  board.write("")


def exchange(name: str, text: str) -> list[str]:
  """What every process has to say, in their order.

  Not a collective of devices: a process that failed before one may take part, too.
  """
  if jax.process_count() == 1:
    return [text]
  board = _Board(name)
  board.write(text)
  return [board.read(i) for i in range(jax.process_count())]


def share(items) -> list:
  """This process's items: every n-th of n processes."""
  return list(items)[jax.process_index() :: jax.process_count()]


def total(array: np.ndarray) -> np.ndarray:
  """The sum over all processes of arrays of one shape; exact for integers of any width."""
  if jax.process_count() == 1:
    return array
  flat = np.ascontiguousarray(array).reshape(-1)
  parts = [gather(flat[i : i + _AT_ONCE]).sum(axis=0) for i in range(0, flat.size, _AT_ONCE)]
  return np.concatenate([flat[:0], *parts]).astype(array.dtype).reshape(array.shape)


def known(values: np.ndarray) -> np.ndarray:
  """float [n, …] of which each process knows some rows, the others being NaN -> those of all."""
  there = total((~np.isnan(values)).astype(np.int32)) > 0
  rows = there.reshape(len(values), -1).all(axis=1)
  return total(np.nan_to_num(values, nan=0.0))[rows]


def joined(array: np.ndarray) -> np.ndarray:
  """The rows of all processes, which may have different numbers of them, in their order."""
  if jax.process_count() == 1:
    return array
  lengths = gather(np.array([len(array)]))[:, 0]
  if not lengths.any():
    return array
  padded = np.zeros((lengths.max(), *array.shape[1:]), array.dtype)
  padded[: len(array)] = array
  every = gather(padded)
  return np.concatenate([rows[:n] for rows, n in zip(every, lengths, strict=True)])


_AT_ONCE = 2**22  # numbers of each process that are on a device at once


def gather(array: np.ndarray) -> np.ndarray:
  """[P, …]: those of all processes. As bytes: JAX would cut 64-bit numbers to 32."""
  if jax.process_count() == 1:
    return array[None]
  every = np.asarray(multihost_utils.process_allgather(np.ascontiguousarray(array).view(np.uint8)))
  return every.view(array.dtype).reshape(jax.process_count(), *array.shape)


SHARD = 16  # batches, at most


def shared_rows(batches: list, compute, directory=None, name="", dtype=np.float32) -> list:
  """Rows of a table that all processes compute together -> its shards, a few batches in each.

  batches    [slices or int arrays]: which rows of the table each batch has
  compute    a function from some of the batches to an iterator of their rows, dtype [n, width]
  directory  where finished shards lie, numbered: an interrupted run goes on from them. It may be
             one for all processes, or one on the disk of each. None: they are kept in memory
  name       shown with the progress, if it takes long
  """
  shards = _shards(batches)
  lengths = [sum(map(_size, shard)) for shard in shards]
  # Named by its rows: with another batch size or number of processes, shards are others.
  path = lambda n: directory / f"{sum(lengths[:n]):09d}-{lengths[n]}.npy"  # noqa: E731
  todo = [n for n in share(range(len(shards))) if directory is None or not path(n).exists()]
  found, rows = {}, compute([batch for n in todo for batch in shards[n]])
  shown = dict(unit=f" {name}", disable=not name or not is_primary(), file=sys.stdout, delay=2)
  with tqdm(total=sum(lengths[n] for n in todo), **shown) as bar:
    for n in todo:
      parts = []
      for _ in shards[n]:
        parts.append(next(rows))
        bar.update(len(parts[-1]))
      found[n] = np.concatenate(parts)
      if directory is not None:
        found[n] = _saved(path(n), found[n])
  if directory is not None:
    exchange("rows", "")  # all are written
    others = set(range(len(shards))) - found.keys()
    found |= {n: _load(path(n)) for n in others if path(n).exists()}
  for n, rows in _lacking(found, lengths, dtype):
    found[n] = rows if directory is None else _saved(path(n), rows)
  return [found[n] for n in range(len(shards))]


def assemble(batches: list, shards: list[np.ndarray], table: np.ndarray | None = None):
  """What `shared_rows` was given and what it returned -> the table, or that one filled."""
  if table is None:
    table = np.empty((sum(map(_size, batches)), shards[0].shape[1]), np.float32)
  for rows, shard in zip(shards, _shards(batches), strict=True):
    done = 0
    for batch in shard:
      table[batch] = rows[done : done + _size(batch)]
      done += _size(batch)
  return table


def _shards(batches):
  """Of at most SHARD batches, and so many that every process has one."""
  size = min(SHARD, -(-len(batches) // jax.process_count()))
  return [batches[i : i + size] for i in range(0, len(batches), max(1, size))]


def _lacking(found, lengths, dtype):
  """Yields (number, rows) of the shards that this process has not, from those that have them."""
  if jax.process_count() == 1:
    return
  here = np.array([n in found for n in range(len(lengths))], np.int32)
  widths = joined(np.array([rows.shape[1] for rows in found.values()][:1], np.int64))
  for n in np.flatnonzero(total(1 - here)):
    mine = n % jax.process_count() == jax.process_index()
    rows = np.asarray(found[n]) if mine else np.zeros((lengths[n], widths[0]), dtype)
    # As bytes: each bit arrives. Not `total`: that would hold the rows of all processes.
    rows = multihost_utils.broadcast_one_to_all(rows.view(np.uint8), is_source=mine)
    if not here[n]:
      yield int(n), np.asarray(rows).view(dtype)


def _load(path):
  return np.load(path, mmap_mode="r", allow_pickle=False)


def _saved(path, array):
  """Written, whole or not at all, and memory-mapped."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with (unfinished := path.with_name(f".{path.name}.{os.getpid()}")).open("wb") as file:
    np.save(file, array, allow_pickle=False)
  unfinished.replace(path)
  return _load(path)


def _size(batch):
  return batch.stop - batch.start if isinstance(batch, slice) else len(batch)


def line(error: BaseException) -> str:
  """An exception in one line."""
  return " ".join(str(error).split())[:300] or type(error).__name__


class _Board:
  """One text of each process, in the key-value store of the coordinator."""

  _uses = collections.defaultdict(itertools.count)  # all processes use a name equally often

  def __init__(self, name):
    self._key = f"xe_retrieval/{name}/{next(self._uses[name])}"
    self._client = distributed.global_state.client

  def write(self, text):
    self._client.key_value_set(f"{self._key}/{jax.process_index()}", f"{text}.")  # never empty

  def read(self, process):
    return self._client.blocking_key_value_get(f"{self._key}/{process}", 1000 * TIMEOUT)[:-1]


class Interruption:
  """`with Interruption(mesh) as interrupted:` makes interrupted() True after SIGINT or SIGTERM.

  A second signal kills as usual. Several processes get the same answer at the same step, one step
  after the first signal. (JAX's preemption service handles neither SIGINT nor a second signal.)
  """

  def __init__(self, mesh):
    self._any = _any_process(mesh) if jax.process_count() > 1 else None
    self._signalled, self._answer = False, False

  def __enter__(self):
    self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
    return self._interrupted

  def __exit__(self, *_):
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _interrupted(self):
    if not self._any:
      return self._signalled
    # The answer of the previous step: waiting for this step's would stall the devices.
    answer, self._answer = self._answer, self._any(self._signalled)
    return bool(answer)

  def _handle(self, number, frame):
    self._signalled = True
    signal.signal(number, self._before[number])


def _any_process(mesh):
  """A function bool -> bool [], true if it was called with True in any process; asynchronous."""
  rows, everywhere = mesh_lib.rows(mesh), mesh_lib.replicated(mesh)
  reduce = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)

  def any_process(flag):
    local = np.full(len(mesh.local_devices), flag)
    return reduce(jax.make_array_from_process_local_data(rows, local))

  return any_process
