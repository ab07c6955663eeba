"""A server whose vectors lie in a Milvus that does not answer for a while."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.serving.conftest import Client, running

pytest.importorskip("milvus_lite")


@pytest.fixture
def milvus(tmp_path):
  """milvus-lite as a server of its own: its process and address."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  command = ["-m", "milvus_lite", "server", "--data-dir", str(tmp_path / "data")]
  command += ["--host", "127.0.0.1", "--port", str(port)]
  process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)
  try:
    assert process.stdout.readline()  # it listens
    yield process, f"http://127.0.0.1:{port}"
  finally:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.fixture
def store(milvus):
  return f"milvus:{milvus[1]},photos"


def asked(port, path):
  """(status, seconds, content)."""
  start = time.monotonic()
  status, _, content = Client(port)(path)
  return status, time.monotonic() - start, content


def test_milvus_hangs(milvus, index, model):
  """Other requests are answered as ever, those that need it with 503 after a few seconds."""
  process, _ = milvus
  with running(index, model) as (port, _), concurrent.futures.ThreadPoolExecutor(40) as pool:
    search = "/api/search?q=a+red+circle&threshold=-1"
    status, _, content = asked(port, search)
    assert status == 200
    hit = content["results"][0]
    paths = [f"/api/image/{hit['id']}", f"/api/search?like={hit['id']}", "/api/curve?q=a"]
    paths += [search, f"{search}&folder=photos/deeper", f"/api/similar/{hit['id']}"]
    paths += [f"{search}&offset={i}" for i in range(12)]
    os.kill(process.pid, signal.SIGSTOP)
    found = [pool.submit(asked, port, path) for path in paths]
    longest = 0
    while not all(one.done() for one in found):
      status, seconds, _ = asked(port, "/healthz")
      assert status == 200
      longest = max(longest, seconds)
      time.sleep(0.05)
    assert longest < 1
    # What this server knows from before still is answered.
    for path, one in zip(paths, found, strict=True):
      status, seconds, content = one.result()
      assert seconds < 9 and status == (200 if "/image/" in path else 503), (path, status)
      assert status == 200 or content["detail"].startswith("Milvus at http://127")
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(1.5)
    assert asked(port, search)[0] == 200


def test_a_curve_takes_few_questions_and_leaves_search_alone(milvus, index, model, monkeypatch):
  """Of an engine that cannot look at all images at once, and is slow."""
  with running(index, model) as (port, service):
    store, asked_for = service.searcher.collection.store, []
    expected = asked(port, "/api/curve?q=a+red+circle")[2]
    above, least = store.above, []

    def slow(queries, low, where=None):
      asked_for.append(float(low[0]))
      time.sleep(0.4)
      return above(queries, low, where) if low[0] > -0.5 else [None] * len(queries)

    monkeypatch.setattr(store, "histogram", lambda queries, grid: None)
    monkeypatch.setattr(store, "above", slow)
    service._current._curves.cache_clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      curve = pool.submit(asked, port, "/api/curve?q=a+red+circle")
      while not curve.done():
        status, seconds, _ = asked(port, "/api/search?q=a+red+circle&threshold=0.9")
        least.append(seconds)
        assert status == 200
      status, _, content = curve.result()
    assert status == 200 and content["others"] == [] and len(asked_for) < 10
    assert len(least) > 5 and max(least) < 1
    # What can be listed is right, and below that all images are said to reach the score.
    listed = [score > -0.5 for score in content["scores"]]
    for one, of, there in zip(content["images"], expected["images"], listed, strict=True):
      assert one == (of if there else 30)
