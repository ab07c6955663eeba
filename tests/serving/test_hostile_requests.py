"""Requests that nobody should send: by the API's own description, and by hand."""

import collections
import concurrent.futures
import random
import re
import socket
import urllib.parse

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.serving.conftest import Client

quote = urllib.parse.quote


def test_responses_conform_to_openapi(server):
  """Generated valid and invalid requests to every operation; responses conform to OpenAPI."""
  api = schemathesis.openapi.from_url(f"http://127.0.0.1:{server}/api/openapi.json")
  asked = collections.Counter()
  wanted = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
  ]
  for operation in (found.ok() for found in api.get_all_operations()):
    for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
      if mode == GenerationMode.NEGATIVE and operation.label == "GET /api/about":
        continue  # has no parameters that could be invalid

      @settings(
        max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
      )
      @given(case=operation.as_strategy(generation_mode=mode))
      def ask(case):
        asked[case.operation.label] += 1
        case.call_and_validate(checks=wanted)

      ask()
  assert len(asked) == 9 and sum(asked.values()) > 200
  # Generated ids are unknown to the index: ask for an image that it has.
  id = Client(server)("/api/search?q=a&threshold=-1")[2]["results"][0]["id"]
  for path in ("/api/similar/{id}", "/api/image/{id}", "/image/{id}"):
    response = api[path]["GET"].Case(path_parameters={"id": id}).call_and_validate(checks=wanted)
    assert response.status_code == 200


NASTY = (
  *("../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "\\..\\boot.ini", "file:///etc/passwd"),
  *("<script>alert(1)</script>", "' OR 1=1 --", "${jndi:ldap://x}", "{{7*7}}", "%00", "%ff%fe"),
  *("\u202e\ufeff", "🦊" * 40, "a" * 499, "%F0%9F", "\x7f\x01", "NaN", "1e999", "-0", "0x10"),
  *("[]", "null", "true", "%", "%%%", "?", "#", "&&&", "="),
)
HOSTS = (*(b"127.0.0.1", b"localhost:80", b"[::1]:1") * 5, b"evil.example", b"")
ROUTES = (
  *("/api/search?q=", "/api/similar/", "/image/", "/api/image/", "/", "/api/", "/page.js/"),
  *("/api/search?q=a&top=", "/api/search?q=a&threshold=", "/api/search?q=a&min_probability="),
  *("/api/search?q=a&near=", "/image/0123456789abcdef?large="),
)
METHODS = (*(b"POST",) * 3, b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE")


def hostile(number):
  """Returns request `number` and its method.

  Every value in every route, raw (which may be invalid HTTP) and quoted, by GET and by another
  method; headers and bodies are random.
  """
  draw = random.Random(number)
  rest, value = divmod(number, len(NASTY))
  form, route = divmod(rest, len(ROUTES))
  value = NASTY[value] if form % 2 == 0 else quote(NASTY[value], safe="")
  value = value.encode("utf-8", "replace").replace(b"\n", b"").replace(b" ", b"+")
  path = ROUTES[route].encode() + value
  method = b"GET" if form < 2 else draw.choice(METHODS)
  body = b""
  if method == b"POST":
    path = b"/api/search"
    body = draw.choice([
      b"{", b"[]", b'{"queries": null}', b'{"queries": [1e400]}', b'{"queries": ["\\ud800"]}',
      b'{"queries": ["' + value.replace(b'"', b"").replace(b"\\", b"") + b'"], "top": 1e9}',
      b"[" * 5000, b"\xff" * 100, b'{"queries": [' + b'"a",' * 100 + b'"a"]}',
    ])  # fmt: skip
  head = [b"Host: " + draw.choice(HOSTS)]
  head.append(b"Content-Length: " + str(len(body)).encode())
  if draw.random() < 0.1:
    head.append(b"X-Long: " + b"x" * draw.choice([10, 5_000]))
  if draw.random() < 0.1:
    head.append(b"Range: bytes=0-99999999999")
  return b"%s %s HTTP/1.1\r\n%s\r\n\r\n%s" % (method, path, b"\r\n".join(head), body), method


def test_hostile_requests(server):
  """Every request is answered, none with a server error, and the server still works after."""
  count, workers = 4 * len(NASTY) * len(ROUTES), 4
  expected = Client(server)("/api/search?q=a+red+circle&threshold=-1")[2]

  def work(worker):
    statuses, connection = [], None
    for number in range(worker, count, workers):
      request, method = hostile(number)
      connection = connection or socket.create_connection(("127.0.0.1", server), 30)
      connection.sendall(request)
      status, keep = read_answer(connection, method)
      statuses.append(status)
      if not keep:
        connection.close()
        connection = None
    return statuses

  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    statuses = [s for part in pool.map(work, range(workers)) for s in part]
  assert len(statuses) == count
  assert {s for s in statuses if s >= 500} == set()
  assert {200, 400, 404, 405, 421, 422} <= set(statuses)
  assert Client(server)("/api/search?q=a+red+circle&threshold=-1")[2] == expected


def read_answer(connection, method):
  """Returns the status, and whether the connection stays open."""
  data = b""
  while b"\r\n\r\n" not in data:
    more = connection.recv(65_536)
    if not more:
      raise AssertionError(f"the connection was closed without an answer after {data[:100]}")
    data += more
  head, _, body = data.partition(b"\r\n\r\n")
  length = re.search(rb"(?i)content-length: *(\d+)", head)
  while method != b"HEAD" and length and len(body) < int(length[1]):
    body += connection.recv(65_536)
  assert b"Traceback" not in body and b"root:" not in body
  closes = re.search(rb"(?i)connection: *close", head) or not length
  return int(head.split()[1]), not closes
