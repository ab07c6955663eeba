"""ASGI middleware: checks on every request, security headers on every response."""

import hmac
import http.cookies
import ipaddress
import json
import urllib.parse

from starlette.exceptions import HTTPException

from xe_retrieval.serving.limits import LIMITS

HEADERS = {
  # blob: is the picture that the user has chosen as a query
  "content-security-policy": "default-src 'none'; img-src 'self' blob:; style-src 'self'; "
  "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'",
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "cross-origin-resource-policy": "same-origin",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
ANY_HOST = "*"
COOKIE = "xe_token"  # images of the page cannot be asked for with an Authorization header


class RequestLimits:
  """Rejects foreign Host headers, wrong tokens and oversized requests; adds security headers.

  The check of the Host guards against DNS rebinding, by which a foreign page reaches this server
  under its own name: so names must be among `hosts`, while addresses like 10.0.0.7 are always
  accepted. Starlette's TrustedHostMiddleware answers in plain text, where the API promises JSON.

  `open_paths` need no token. `base` is the path under which a proxy shows this server; it may
  have taken it off or not.
  """

  def __init__(self, app, hosts, token="", open_paths=(), base=""):
    self.app, self.hosts, self.base = app, tuple(hosts), base.encode()
    self.token, self.open_paths = token, frozenset(open_paths)
    self.active = 0

  async def __call__(self, scope, receive, send):
    if scope["type"] != "http":
      return await self.app(scope, receive, send)

    async def safe_send(message):
      if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], *_HEADERS]}
      await send(message)

    scope = self._without_base(scope)
    headers = dict(scope["headers"])
    if refused := self._refused(scope, headers):
      return await _refuse(safe_send, *refused)
    kind = headers.get(b"content-type", b"")
    most = LIMITS["picture" if kind.startswith(b"image/") else "body"]
    too_long = f"the body is longer than {most:,} bytes"
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > most:
      return await _refuse(safe_send, 413, too_long)
    received = 0

    async def limited_receive():
      """Enforces the limit on chunked bodies, which have no Content-Length."""
      nonlocal received
      message = await receive()
      received += len(message.get("body", b""))
      if received > most:
        raise HTTPException(413, too_long)  # the one kind that FastAPI lets through
      return message

    self.active += 1
    try:
      await self.app(scope, limited_receive, safe_send)
    finally:
      self.active -= 1

  def _without_base(self, scope):
    path = scope.get("raw_path") or scope["path"].encode()
    if not self.base or not (path + b"/").startswith(self.base + b"/"):
      return scope
    if path == self.base:
      return scope | {"path": "", "raw_path": b""}  # redirected to the page, whose links need the /
    path = path[len(self.base) :]
    return scope | {"path": urllib.parse.unquote(path.decode("latin-1")), "raw_path": path}

  def _refused(self, scope, headers):
    """(status, sentence, headers) if the request is not to be answered."""
    if ANY_HOST not in self.hosts and not _accepted(headers.get(b"host", b""), self.hosts):
      sentence = (
        f"this server answers to {' or '.join(self.hosts)} and to IP addresses only; "
        "its --allowed_hosts lists names"
      )
      return 421, sentence
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > LIMITS["address"]:
      return 414, f"the address is longer than {LIMITS['address']:,} bytes"
    if sum(len(name) + len(value) for name, value in scope["headers"]) > LIMITS["headers"]:
      return 431, f"the headers are longer than {LIMITS['headers']:,} bytes"
    if self.token and scope["path"] not in self.open_paths and not self._knows_token(headers):
      sentence = "this server needs its token: Authorization: Bearer …"
      return 401, sentence, [(b"www-authenticate", b"Bearer")]
    if self.active >= LIMITS["active"]:
      sentence = f"{LIMITS['active']:,} requests are being answered; ask again in a second"
      return 429, sentence, [(b"retry-after", b"1")]
    if not scope["path"]:
      return 308, "the page is one level deeper", [(b"location", self.base + b"/")]
    return None

  def _knows_token(self, headers):
    given = headers.get(b"authorization", b"").decode("latin-1")
    given = given[7:] if given[:7].lower() == "bearer " else ""
    if not given:
      try:
        cookies = http.cookies.SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
      except http.cookies.CookieError:
        return False
      given = urllib.parse.unquote(cookies[COOKIE].value) if COOKIE in cookies else ""
    return hmac.compare_digest(given.encode(), self.token.encode())


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


async def _refuse(send, status, sentence, headers=()):
  body = json.dumps({"detail": sentence}).encode()
  headers = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(body)).encode()),
    (b"connection", b"close"),
    *headers,
  ]
  await send({"type": "http.response.start", "status": status, "headers": headers})
  await send({"type": "http.response.body", "body": body})
