"""HTTP connections with limits that uvicorn's fast parser does not have."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xe_retrieval.serving.limits import LIMITS

HEAD_SECONDS = 20  # in which the head of a request has to arrive


class LimitedProtocol(HttpToolsProtocol):
  """Closes connections whose request has an endless head, or one that never gets complete."""

  _head, _timer = 0, None  # bytes of the head so far; runs while it is incomplete

  def connection_made(self, transport):
    super().connection_made(transport)
    self._wait()

  def data_received(self, data):
    if self._timer is None and self._between():
      self._wait()
    if self._timer is not None:
      self._head += len(data)
    super().data_received(data)
    # What is counted may end in a part of the body: hence the room for it.
    if self._timer is not None and self._head > 2 * LIMITS["headers"] + LIMITS["address"]:
      self.transport.close()

  def on_headers_complete(self):
    self._stop()
    super().on_headers_complete()

  def connection_lost(self, exc):
    self._stop()
    super().connection_lost(exc)

  def _between(self):
    return self.cycle is not None and self.cycle.response_complete

  def _wait(self):
    self._head, self._timer = 0, self.loop.call_later(HEAD_SECONDS, self.transport.close)

  def _stop(self):
    if self._timer is not None:
      self._timer.cancel()
    self._timer = None
