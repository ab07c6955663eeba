"""ASGI middleware: checks on every request, security headers on every response."""

import json

HEADERS = {
  "content-security-policy": "default-src 'none'; img-src 'self'; style-src 'self'; "
  "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'",
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "cross-origin-resource-policy": "same-origin",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class RequestLimits:
  """Rejects foreign Host headers and oversized addresses and bodies; adds security headers.

  `hosts` lists the accepted Host names, None accepts all. The check guards against DNS rebinding.
  Starlette's TrustedHostMiddleware answers in plain text, where the API promises JSON.
  """

  def __init__(self, app, hosts, max_address: int, max_body: int):
    self.app, self.hosts = app, hosts
    self.max_address, self.max_body = max_address, max_body

  async def __call__(self, scope, receive, send):
    if scope["type"] != "http":
      return await self.app(scope, receive, send)

    async def safe_send(message):
      if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], *_HEADERS]}
      await send(message)

    headers = dict(scope["headers"])
    if self.hosts and _host(headers.get(b"host", b"")) not in self.hosts:
      sentence = f"this server answers to {' or '.join(self.hosts)} only"
      return await _refuse(safe_send, 421, sentence)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self.max_address:
      sentence = f"the address is longer than {self.max_address:,} bytes"
      return await _refuse(safe_send, 414, sentence)
    too_long = f"the body is longer than {self.max_body:,} bytes"
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > self.max_body:
      return await _refuse(safe_send, 413, too_long)
    received = 0

    async def limited_receive():
      """Enforces the limit on chunked bodies, which have no Content-Length."""
      nonlocal received
      message = await receive()
      received += len(message.get("body", b""))
      if received > self.max_body:
        raise _TooLong
      return message

    try:
      await self.app(scope, limited_receive, safe_send)
    except _TooLong:
      await _refuse(safe_send, 413, too_long)


class _TooLong(Exception):
  pass


def _host(value):
  """The host name in a Host header, without the port."""
  name = value.decode("latin-1").strip().lower()
  return name.rpartition(":")[0] if ":" in name and not name.endswith("]") else name


async def _refuse(send, status, sentence):
  body = json.dumps({"detail": sentence}).encode()
  headers = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(body)).encode()),
    (b"connection", b"close"),
  ]
  await send({"type": "http.response.start", "status": status, "headers": headers})
  await send({"type": "http.response.body", "body": body})
