"""One worker process of `workers`: python -m xe_retrieval.data.feed.worker PIPE MEMORY"""

import contextlib
import pickle
import signal
import sys
import traceback
from multiprocessing import connection

_ENDED = (EOFError, BrokenPipeError, ConnectionResetError)  # the parent has, or needs no more


def main(pipe: int, memory: int) -> None:
  # Ctrl-C and a scheduler's SIGTERM reach the whole group: the parent answers them, and may need
  # another batch. A worker ends when the pipe to its parent closes.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  from xe_retrieval.data.feed import workers  # after the signals: it takes a while

  parent = connection.Connection(pipe)
  with contextlib.suppress(*_ENDED):
    pairs, steps = pickle.loads(parent.recv_bytes())
    rows, slots = parent.recv(), workers.slots_of(memory, pairs.layout())
    for step in steps:
      parent.recv_bytes()  # its slot is free
      parent.send(_result(pairs, slots[step % workers.SLOTS], step, rows))


def _result(pairs, slot, step, rows):
  """The number of broken images, or what went wrong, in one line and in full."""
  try:
    return pairs.fill(slot, step, rows)
  except Exception as error:
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}", traceback.format_exc()


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]))
