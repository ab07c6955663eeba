"""Running the server: health, metrics, log, token, base path, limits of connections, shutdown."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

import xe_retrieval
from tests.conftest import ROOT
from tests.search.conftest import make_workdir
from tests.serving.conftest import Client, running
from xe_retrieval.search import image_sources, update
from xe_retrieval.serving import protocol
from xe_retrieval.serving.limits import LIMITS


def test_health_and_metrics(client):
  assert client("/healthz")[2] == {"status": "ok", "images": 30, "reloads": 0}
  for _ in range(3):
    client("/api/search?q=a+red+circle")
  client("/api/search")
  client("/nowhere/at/all")
  content = client("/metrics")[2].decode()
  found = {
    (sample.name, *sorted(sample.labels.items())): sample.value
    for family in text_string_to_metric_families(content)
    for sample in family.samples
  }

  def requests(route, status):
    return found["xe_requests_total", ("method", "GET"), ("route", route), ("status", status)]

  assert requests("/api/search", "200") == 3 and requests("/api/search", "422") == 1
  assert requests("other", "404") == 1
  assert found["xe_request_seconds_count", ("route", "/api/search")] == 4
  assert found["xe_query_cache_total", ("from", "cache")] == 2
  assert found["xe_query_cache_total", ("from", "tower")] == 1
  assert (found["xe_images",], found["xe_generation",], found["xe_queue",]) == (30, 1, 0)


def test_the_health_check_of_the_container(server):
  text = (ROOT / "Dockerfile").read_text()
  command = json.loads(re.search(r"^HEALTHCHECK .*?CMD (\[.*?\])$", text, re.S | re.M)[1])
  with socket.create_server(("127.0.0.1", 0)) as free:
    closed = free.getsockname()[1]
  for port, healthy in ((server, True), (closed, False)):
    program = command[-1].replace(":8000/", f":{port}/")
    out = subprocess.run([sys.executable, *command[1:-1], program], capture_output=True)
    assert (out.returncode == 0) == healthy


def test_the_access_log_has_no_words(index, model):
  log = io.StringIO()
  with running(index, model, log=log) as (port, _):
    Client(port)("/api/search?q=my+secret")
  (line,) = map(json.loads, log.getvalue().splitlines())
  assert (line["path"], line["status"], line["method"]) == ("/api/search", 200, "GET")
  assert line["client"] == "127.0.0.1" and line["ms"] > 0 and line["bytes"] > 100
  assert "secret" not in log.getvalue()


def test_a_token_by_header_or_cookie(index, model):
  with running(index, model, token="sesame, öpen") as (port, _):
    client = Client(port)
    for headers, status in [
      ({}, 401),
      ({"authorization": "Bearer wrong"}, 401),
      ({"cookie": "xe_token=wrong"}, 401),
      ({"cookie": "xe_token=sesame%2C%20%C3%B6pen; other=1"}, 200),
    ]:
      for path in ("/api/about", "/metrics"):
        client.connection.close()
        found = client(path, headers=headers)
        assert found[0] == status
        assert status == 200 or found[1]["www-authenticate"] == "Bearer"
    for path in ("/", "/page.js", "/healthz"):
      client.connection.close()
      assert client(path)[0] == 200


def test_behind_a_proxy(index, model):
  """With the prefix, and without where the proxy has taken it off."""
  with running(index, model, base="/find/images") as (port, _):
    client = Client(port)
    status, headers, _ = client("/find/images")
    assert (status, headers["location"]) == (308, "/find/images/")
    client.connection.close()
    for base in ("/find/images", ""):
      assert client(f"{base}/")[2].startswith(b"<!doctype html>")
      hit = client(f"{base}/api/search?q=a&threshold=-1")[2]["results"][0]
      assert client(f"{base}/{hit['url']}")[1]["content-type"] == "image/png"
    assert client("/find/imagesx/")[0] == 404


def test_endless_and_slow_heads_are_cut_off(server, monkeypatch):
  monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
  with socket.create_connection(("127.0.0.1", server)) as slow:
    slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    slow.settimeout(20)
    assert slow.recv(100) == b""
  with socket.create_connection(("127.0.0.1", server)) as endless:
    endless.settimeout(20)
    endless.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(OSError):  # the connection is closed long before these 10 MB
      for _ in range(10_000):
        endless.sendall(b"X-Long: " + b"x" * 1_000 + b"\r\n")
  client = Client(server)
  status, _, found = client("/api/about", headers={"x-long": "x" * 40_000})
  assert status == 431 and "headers are longer than 32,768" in found["detail"]


def test_too_many_at_once(server, monkeypatch):
  monkeypatch.setitem(LIMITS, "active", 0)
  status, headers, found = Client(server)("/api/about")
  assert (status, headers["retry-after"]) == (429, "1")


def test_another_model_is_warm_before_it_serves(index, photos, model, tmp_path):
  other = make_workdir(tmp_path, seed=1)
  with running(index, model) as (port, service):
    client = Client(port)
    data = (photos / "scene000.png").read_bytes()
    like = client("/api/search", "POST", data, {"content-type": "image/png"})[2]["like"]
    new = xe_retrieval.load(other)
    update.update_index(index, new, other, [image_sources.Folder(photos)], rebuild=True)
    end = time.monotonic() + 60
    while service.searcher.model is model:
      assert time.monotonic() < end, "the new model was not loaded"
      time.sleep(0.02)
    assert service.searcher.model._encoders.cache_info().currsize >= 7  # 1, 2, 4, … 64
    # A picture is known to the model that embedded it: the page sends it again.
    client = Client(port)  # the other connection may have been idle for too long
    assert client(f"/api/search?like={like}")[0] == 404
    assert client("/metrics")[2].decode().find("xe_reloads_total 1.0") > 0


def test_sigterm_answers_what_is_at_hand(index, photos, tmp_path):
  log = tmp_path / "access.log"
  command = [sys.executable, "-m", "xe_retrieval.serve", f"--index={index}", "--port=0"]
  command += [f"--access_log={log}", "--base_path=/x"]
  (tmp_path / "token").write_text("sesame\n")
  command += ["--host=0.0.0.0", "--allowed_hosts=Search.example", f"--token=@{tmp_path / 'token'}"]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  line = next(found for found in process.stdout if "images" in found)
  port = int(re.search(r"0\.0\.0\.0:(\d+)/x/ ", line)[1])
  client = Client(port)
  assert client("/x/healthz")[0] == 200
  # Names are checked on every interface.
  token = {"authorization": "Bearer sesame"}
  for path, headers, status in [
    ("/healthz", {"host": "evil.example"}, 421),
    ("/healthz", {"host": f"search.example:{port}"}, 200),
    ("/api/about", {"host": "localhost"}, 401),
    ("/api/about", {"host": "10.0.0.7"} | token, 200),
  ]:
    assert client(path, headers=headers)[0] == status
    client.connection.close()
  picture = (photos / "scene000.png").read_bytes()
  head = "POST /x/api/search HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n"
  head += f"Content-Type: image/png\r\nContent-Length: {len(picture)}\r\n\r\n"
  with socket.create_connection(("127.0.0.1", port)) as connection:
    connection.settimeout(20)
    connection.sendall(head.encode() + picture[:-10])  # its last bytes come after the signal
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGTERM)
    end = time.monotonic() + 20
    with pytest.raises(ConnectionRefusedError):  # nothing new is taken on
      while time.monotonic() < end:
        socket.create_connection(("127.0.0.1", port)).close()
        time.sleep(0.02)
    connection.sendall(picture[-10:])
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
  assert process.wait(60) in (0, -signal.SIGTERM)
  assert [json.loads(x)["path"] for x in log.read_text().splitlines()][0] == "/x/healthz"
