"""ASGI middleware: checks on every request, security headers on every response."""

import ipaddress
import json

from starlette.exceptions import HTTPException

HEADERS = {
  "content-security-policy": "default-src 'none'; img-src 'self'; style-src 'self'; "
  "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'",
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "cross-origin-resource-policy": "same-origin",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
ANY_HOST = "*"


class RequestLimits:
  """Rejects foreign Host headers and oversized addresses and bodies; adds security headers.

  The check of the Host guards against DNS rebinding, by which a foreign page reaches this server
  under its own name: so names must be among `hosts`, while addresses like 10.0.0.7 are always
  accepted. Starlette's TrustedHostMiddleware answers in plain text, where the API promises JSON.
  """

  def __init__(self, app, hosts, max_address: int, max_body: int):
    self.app, self.hosts = app, tuple(hosts)
    self.max_address, self.max_body = max_address, max_body

  async def __call__(self, scope, receive, send):
    if scope["type"] != "http":
      return await self.app(scope, receive, send)

    async def safe_send(message):
      if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], *_HEADERS]}
      await send(message)

    headers = dict(scope["headers"])
    if ANY_HOST not in self.hosts and not _accepted(headers.get(b"host", b""), self.hosts):
      sentence = (
        f"this server answers to {' or '.join(self.hosts)} and to IP addresses only; "
        "its --allowed_hosts lists names"
      )
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
        raise HTTPException(413, too_long)  # the one kind that FastAPI lets through
      return message

    await self.app(scope, limited_receive, safe_send)


def _accepted(host, names):
  """Whether a Host header, without its port, is one of the names or an IP address."""
  host = host.decode("latin-1").strip().lower()
  host = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
  if host in names:
    return True
  try:
    return bool(ipaddress.ip_address(host.strip("[]")))
  except ValueError:
    return False


async def _refuse(send, status, sentence):
  body = json.dumps({"detail": sentence}).encode()
  headers = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(body)).encode()),
    (b"connection", b"close"),
  ]
  await send({"type": "http.response.start", "status": status, "headers": headers})
  await send({"type": "http.response.body", "body": body})
