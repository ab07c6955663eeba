"""The server as a stranger meets it: answers, limits, hostile requests, load, a changing index."""

import collections
import concurrent.futures
import random
import re
import socket
import threading
import time
import urllib.parse

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.search.conftest import Client, draw, running
from xe_retrieval.retrieval import indexing, sources
from xe_retrieval.serving import state as states

quote = urllib.parse.quote


def test_search_and_its_neighbours(client, photos):
  status, headers, about = client("/api/about")
  assert (status, about["images"], about["captions"]) == (200, 30, 0)
  assert about["thresholds"]["measured_on"] == "made up test (100 captions × 100 images)"

  status, _, all_of_it = client("/api/search?q=a+red+circle&threshold=-1&top=200")
  assert status == 200 and all_of_it["relevant"] and len(all_of_it["results"]) == 30
  scores = [hit["score"] for hit in all_of_it["results"]]
  assert scores == sorted(scores, reverse=True) and all_of_it["best_score"] == scores[0]

  cut = (scores[4] + scores[5]) / 2
  status, _, some = client(f"/api/search?q=a+red+circle&threshold={cut}&near=3")
  assert some["results"] == all_of_it["results"][:5]
  assert some["near_misses"] == all_of_it["results"][5:8]
  status, _, batch = client("/api/search", "POST", {"queries": ["a red circle"], "threshold": cut})
  assert batch == [some | {"near_misses": []}]

  status, _, sure = client("/api/search?q=a+red+circle&min_precision=0.5")
  assert all(hit["precision"] >= 0.5 for hit in sure["results"])
  best = scores[0]
  _, _, none = client(f"/api/search?q=a+red+circle&threshold={min(best + 0.01, 1)}")
  assert not none["relevant"] and none["results"] == []

  first = all_of_it["results"][0]
  status, headers, picture = client(first["url"])
  assert (status, headers["content-type"], picture[:4]) == (200, "image/png", b"\x89PNG")
  _, _, similar = client(f"/api/similar/{first['id']}?top=4")
  assert similar["image"]["image"] == first["image"] and len(similar["images"]) == 4
  assert first["id"] not in [hit["id"] for hit in similar["images"]]
  assert client(f"/api/image/{first['id']}")[2] == similar["image"]


def test_answers_that_say_what_is_wrong(client):
  for path, status, sentence in [
    ("/api/search", 422, "q: Field required"),
    ("/api/search?q=", 422, "q: String should have at least 1 character"),
    ("/api/search?q=+", 422, "q: String should match"),
    (f"/api/search?q={'x' * 501}", 422, "q: String should have at most 500 characters"),
    (f"/api/search?q={'x' * 9000}", 414, "the address is longer than 8,192 bytes"),
    ("/api/search?q=a&top=0", 422, "top: Input should be greater than or equal to 1"),
    ("/api/search?q=a&top=201", 422, "top: Input should be less than or equal to 200"),
    ("/api/search?q=a&threshold=nan", 422, "threshold: "),
    ("/api/search?q=a&threshold=0&min_precision=0.5", 422, "a threshold or a precision, not both"),
    ("/api/search?q=a&min_precision=0.99", 422, "no threshold has precision 0.99 on made up test"),
    ("/api/similar/../../etc/passwd", 404, "Not Found"),
    ("/api/similar/0123456789abcdef", 404, "the index has no image 0123456789abcdef"),
    ("/image/..%2f..%2fetc%2fpasswd", 404, "Not Found"),
    ("/image/zzzz", 422, "id: String should match pattern"),
    ("/photos/scene000.png", 404, "Not Found"),
    ("/docs", 404, "Not Found"),
  ]:
    found = client(path)
    assert (found[0], path) == (status, path)
    assert sentence in found[2]["detail"]
  for body, status, sentence in [
    ({"queries": ["a"] * 65}, 422, "queries: List should have at most 64 items"),
    ({"queries": []}, 422, "queries: List should have at least 1 item"),
    ({"queries": ["a", 3]}, 422, "queries.1: Input should be a valid string"),
    ({"queries": ["a"], "path": "/etc"}, 422, "path: Extra inputs are not permitted"),
    (b"{", 400, "the body is not JSON"),
    ({"queries": ["a" * 300_000]}, 413, "the body is longer than 262,144 bytes"),
  ]:
    found = client("/api/search", "POST", body, {"content-type": "application/json"})
    assert found[0] == status and sentence in found[2]["detail"]
    client.connection.close()
  assert client("/api/search", "DELETE")[0] == 405


def test_only_for_this_machine_and_its_own_page(client):
  status, _, content = client("/api/about", headers={"host": "evil.example:8000"})
  assert status == 421 and "127.0.0.1" in content["detail"]
  client.connection.close()
  assert client("/api/about", headers={"host": "localhost:8000"})[0] == 200
  status, headers, page = client("/")
  assert status == 200 and headers["x-content-type-options"] == "nosniff"
  assert "default-src 'none'" in headers["content-security-policy"]
  # Nothing from elsewhere, no script or style within the page, nothing built from strings.
  assert not re.search(rb"https?://(?!www\.w3\.org)|<style|style=|onerror|onclick", page)
  script = client("/page.js")[2]
  assert not re.search(rb"innerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_a_broken_picture_has_a_placeholder(client, photos):
  hits = client("/api/search?q=a&threshold=-1&top=3")[2]["results"]
  (photos / hits[0]["image"]).unlink()
  (photos / hits[1]["image"]).write_text("root:x:0:0")
  (photos / hits[2]["image"]).unlink()
  (photos / hits[2]["image"]).symlink_to("/etc/passwd")
  for hit in hits:
    status, headers, content = client(hit["url"])
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    assert b"root" not in content and headers["cache-control"] == "no-store"


def test_more_than_may_wait_is_turned_away(index, model, monkeypatch):
  monkeypatch.setitem(states.LIMITS, "waiting", 4)
  with running(index, model) as (port, state):
    client = Client(port)
    status, headers, content = client("/api/search", "POST", {"queries": list("abcde")})
    assert (status, headers["retry-after"]) == (429, "1")
    assert content["detail"] == "more than 4 requests are waiting; ask again in a second"
    assert client("/api/search", "POST", {"queries": list("abcd"), "threshold": -1})[0] == 200
    monkeypatch.setattr(state, "_drawing", 4)
    url = client("/api/search?q=a&threshold=-1")[2]["results"][0]["url"]
    assert client(url)[0] == 429


def test_keeps_to_its_own_description(server):
  """Made-up requests, right and wrong, to every operation; answers as OpenAPI promises."""
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
        continue  # takes nothing that could be wrong

      @settings(
        max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
      )
      @given(case=operation.as_strategy(generation_mode=mode))
      def ask(case):
        asked[case.operation.label] += 1
        case.call_and_validate(checks=wanted)

      ask()
  assert len(asked) == 6 and sum(asked.values()) > 200


NASTY = (
  *("../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "\\..\\boot.ini", "file:///etc/passwd"),
  *("<script>alert(1)</script>", "' OR 1=1 --", "${jndi:ldap://x}", "{{7*7}}", "%00", "%ff%fe"),
  *("\u202e\ufeff", "🦊" * 40, "a" * 499, "%F0%9F", "\x7f\x01", "NaN", "1e999", "-0", "0x10"),
  *("[]", "null", "true", "%", "%%%", "?", "#", "&&&", "="),
)
HOSTS = (*(b"127.0.0.1", b"localhost:80", b"[::1]:1") * 5, b"evil.example", b"")
ROUTES = ("/api/search?q=", "/api/similar/", "/image/", "/api/image/", "/", "/api/", "/page.js/")


def hostile(number):
  """Request number n, as bytes: any route, any method, nasty values, now and then not even HTTP."""
  draw = random.Random(number)
  value = draw.choice(NASTY)
  if draw.random() < 0.5:
    value = quote(value, safe="")
  value = value.encode("utf-8", "replace").replace(b"\n", b"").replace(b" ", b"+")
  path = draw.choice(ROUTES).encode() + value
  for name in ("top", "threshold", "min_precision", "near", "large", "q"):
    if draw.random() < 0.2:
      path += b"&" + name.encode() + b"=" + quote(draw.choice(NASTY)).encode()
  method = draw.choice([b"GET"] * 6 + [b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE"])
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


def test_ten_thousand_hostile_requests(server):
  """No answer is a server error, every request has one, and the server is as well as before."""
  count, workers = 10_000, 4
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
  """-> status, whether the connection goes on."""
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


def test_steady_under_load_while_the_index_is_replaced(index, photos, model, workdir):
  """Sixteen clients ask without pause; three new indexes come; not one request fails."""
  with running(index, model) as (port, state):
    stop, failures, done = threading.Event(), [], []

    def ask(number):
      client, at = Client(port), 0
      while not stop.is_set():
        at += 1
        found = client(f"/api/search?q={number}+shapes+{at}&threshold=-1&top=5")
        if found[0] != 200 or len(found[2]["results"]) != 5:
          failures.append(found)
        hit = found[2]["results"][at % 5]
        status, headers, _ = client(hit["url"])
        if status not in (200, 404):  # 404: removed since
          failures.append((status, hit))
      done.append(at)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
      thread.start()
    for round in range(3):
      draw(photos, [100 + round])
      (photos / f"scene{round:03d}.png").unlink()
      indexing.update(index, model, workdir, [sources.Folder(photos)])
      wanted = f"g{round + 2:06d}"
      end = time.monotonic() + 30
      while state.searcher.collection.manifest["generation"] != wanted:
        assert time.monotonic() < end, "the new index was not taken over"
        time.sleep(0.02)
    stop.set()
    for thread in threads:
      thread.join()
  assert failures == [] and len(done) == 16 and min(done) > 0
