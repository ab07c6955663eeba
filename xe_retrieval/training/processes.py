"""A run as one process or several: joining, waiting for each other, stopping together."""

import collections
import contextlib
import gc
import itertools
import os
import signal

import jax
import numpy as np
from jax._src import distributed  # its key-value store has no public name

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
    jax.distributed.initialize(address, count, index)
  elif cluster:
    jax.distributed.initialize()


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


@contextlib.contextmanager
def frozen_garbage():
  """Moves objects that exist now out of the garbage collector's reach.

  A full collection over all imported libraries would stall a step by 0.1 s.
  """
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()
