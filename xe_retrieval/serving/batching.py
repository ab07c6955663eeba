"""Queries that arrive together go through the text tower and the index together."""

import asyncio
import collections
import concurrent.futures


class Busy(Exception):
  """More is waiting than is allowed."""


class Batcher:
  """`answer` takes a list of jobs and gives a list of answers; it runs in one thread.

  Nothing is delayed to make batches larger: what has arrived while a batch was being answered is
  the next one. `most` jobs are answered at once, `waiting` may wait.
  """

  def __init__(self, answer, most: int, waiting: int):
    self._answer, self._most, self._waiting = answer, most, waiting
    self._queue = collections.deque()  # (job, future)
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._running = None

  async def ask(self, jobs: list) -> list:
    """The answers to all jobs; Busy, if there is no room for them."""
    if len(self._queue) + len(jobs) > self._waiting:
      raise Busy
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in jobs]
    self._queue.extend(zip(jobs, futures, strict=True))
    if self._running is None or self._running.done():
      self._running = loop.create_task(self._run(loop))
    return await asyncio.gather(*futures)

  async def _run(self, loop):
    while self._queue:
      count = min(self._most, len(self._queue))
      batch = [self._queue.popleft() for _ in range(count)]
      batch = [(job, future) for job, future in batch if not future.done()]  # some were given up
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
