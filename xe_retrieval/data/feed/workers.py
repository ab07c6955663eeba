"""Worker processes that compute batches: the same batches as one process, on more cores.

Threads of one process take turns at Python's global lock, which each image needs for up to 65 µs of
its millisecond: they scale to about a dozen cores (`python -m benchmarks.data --only=core`). Each
worker computes the same rows of every batch, into memory that it shares with this process, and
waits when it is SLOTS batches ahead. It ends when its pipe to this process closes, for any reason.
"""

import contextlib
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from xe_retrieval.data import decoding
from xe_retrieval.data.feed.pairs import Pairs
from xe_retrieval.preparation import cores

SLOTS = 2  # batches in shared memory: one is read while the next is computed
_THREADS_SCALE = 8  # cores that threads of one process can keep busy


def count(wanted: int) -> int:
  """config.data.workers; where that is -1, none on few cores, else all but two for this process."""
  if wanted >= 0:
    return wanted
  available = cores.available()
  return available - 2 if available > _THREADS_SCALE else 0


def batches(pairs: Pairs, steps: range, workers: int) -> Iterator[tuple[dict, int]]:
  """Yields each batch and the number of its broken images; ChildProcessError if a worker fails."""
  workers = min(workers, pairs.rows)
  bounds = [pairs.rows * i // workers for i in range(workers + 1)]
  # Without a name, and so without the size limit of a container's /dev/shm or anything to clean up.
  memory = os.memfd_create("batches")
  os.ftruncate(memory, SLOTS * _bytes(pairs.layout()))
  slots, running = slots_of(memory, pairs.layout()), []
  try:
    for number in range(workers):
      running.append(_Worker(number, memory))
    task = pickle.dumps((pairs, steps))
    for worker, rows in zip(running, itertools.pairwise(bounds), strict=True):
      worker.start(task, slice(*rows))
    for step in steps:
      broken = sum([worker.result(step) for worker in running])
      batch = {name: decoding.aligned(*kind) for name, kind in pairs.layout().items()}
      for name, array in slots[step % SLOTS].items():
        batch[name][...] = array  # JAX may use the memory of a batch for as long as it likes
      for worker in running:
        worker.may_go_on()
      yield batch, broken
  finally:
    for worker in running:
      worker.kill()
    os.close(memory)


def slots_of(memory: int, layout: dict) -> list[dict[str, np.ndarray]]:
  """The arrays of each slot in the memory behind this file descriptor."""
  data = np.frombuffer(mmap.mmap(memory, 0), np.uint8)
  out, end = [], 0
  for _ in range(SLOTS):
    out.append({})
    for name, (shape, kind) in layout.items():
      begin, end = end, end + _size(shape, kind)
      used = int(np.prod(shape)) * np.dtype(kind).itemsize
      out[-1][name] = data[begin : begin + used].view(kind).reshape(shape)
  return out


def _bytes(layout):
  return sum(_size(*kind) for kind in layout.values())


def _size(shape, kind):
  """Bytes of an array, up to a multiple of 64."""
  return -(-int(np.prod(shape)) * np.dtype(kind).itemsize // 64) * 64


class _Worker:
  """One process, and a pipe: free slots go there, numbers of broken images come back."""

  def __init__(self, number, memory):
    self._number = number
    self._pipe, theirs = multiprocessing.Pipe()
    self._process = subprocess.Popen(
      [sys.executable, "-m", "xe_retrieval.data.feed.worker", str(theirs.fileno()), str(memory)],
      pass_fds=(theirs.fileno(), memory),
      stdin=subprocess.DEVNULL,
      env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},  # there is a worker for every core
    )
    theirs.close()

  def start(self, task: bytes, rows: slice):
    with self._reporting("at its start"):
      self._pipe.send_bytes(task)
      self._pipe.send(rows)
      for _ in range(SLOTS):
        self._pipe.send_bytes(b"")

  def result(self, step) -> int:
    """Waits until this worker has its rows of a batch."""
    with self._reporting(f"at step {step + 1}"):
      result = self._pipe.recv()
    if isinstance(result, int):
      return result
    message, details = result
    error = ChildProcessError(f"worker {self._number} of the input pipeline failed: {message}")
    error.add_note(details)
    raise error

  def may_go_on(self):
    with contextlib.suppress(OSError):  # it has ended: as it should, or `result` will tell
      self._pipe.send_bytes(b"")

  def kill(self):
    self._process.kill()
    self._process.wait()
    self._pipe.close()

  @contextlib.contextmanager
  def _reporting(self, when):
    try:
      yield
    except (EOFError, OSError) as error:
      code = self._process.wait()
      how = f"ended with exit code {code}"
      if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        how += " (the machine may be out of memory)" * (-code == signal.SIGKILL)
      raise ChildProcessError(
        f"worker {self._number} of the input pipeline {how} {when}; the same command resumes"
      ) from error
