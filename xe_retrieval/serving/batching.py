"""Dynamic batching: concurrent queries share one pass through the text tower and the index."""

import asyncio
import collections
import concurrent.futures


class Busy(Exception):
  """The queue is full."""


class Batcher:
  """Runs `answer` (list of jobs -> list of answers) in one thread, on batches of queued jobs.

  No job waits for a batch to fill: the next batch is what was queued while the last one ran.
  """

  def __init__(self, answer, max_batch: int, max_queue: int):
    self._answer, self._max_batch, self._max_queue = answer, max_batch, max_queue
    self._queue = collections.deque()  # (job, future)
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._running = None

  @property
  def waiting(self) -> int:
    return len(self._queue)

  async def ask(self, jobs: list) -> list:
    """The answers to all jobs; raises Busy if the queue has no room for them."""
    if len(self._queue) + len(jobs) > self._max_queue:
      raise Busy
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in jobs]
    self._queue.extend(zip(jobs, futures, strict=True))
    if self._running is None or self._running.done():
      self._running = loop.create_task(self._run(loop))
    return await asyncio.gather(*futures)

  async def _run(self, loop):
    while self._queue:
      count = min(self._max_batch, len(self._queue))
      batch = [self._queue.popleft() for _ in range(count)]
      batch = [
        (job, future) for job, future in batch if not future.done()
      ]  # cancelled: client gone
      if not batch:
        continue
      try:
        answers = await loop.run_in_executor(self._thread, self._answer, [job for job, _ in batch])
      except Exception as e:
        answers = [e] * len(batch)
      for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():
          continue
        if isinstance(answer, Exception):
          future.set_exception(answer)
        else:
          future.set_result(answer)
