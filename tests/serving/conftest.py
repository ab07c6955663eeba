"""A server of the drawn images, and a client for it."""

import contextlib
import http.client
import json
import shutil
import socket
import threading

import pytest
import uvicorn
from playwright.sync_api import expect, sync_playwright

from tests.search.conftest import *  # noqa: F403 the model, images and index
from xe_retrieval.serving import app as apps
from xe_retrieval.serving.protocol import LimitedProtocol
from xe_retrieval.serving.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM = CHROMIUM or shutil.which("google-chrome")
OPTIONS = (
  *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
  *("--disable-component-update", "--disable-dev-shm-usage"),
)
LOADED = "(least) => [...document.images].filter((i) => i.naturalWidth > 0).length >= least"

expect.set_options(timeout=30_000)


@pytest.fixture
def store():
  """Of the index that is served; test_milvus_server.py serves from Milvus-lite."""
  return "files"


class Client:
  """A persistent HTTP connection to a server on this machine."""

  def __init__(self, port):
    self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

  def __call__(self, path, method="GET", body=None, headers=()):
    """Returns status, headers, content (parsed if it is JSON)."""
    headers = dict(headers)
    if isinstance(body, list | dict):
      body, headers = json.dumps(body), {"content-type": "application/json"} | headers
    path = path if path.startswith("/") else f"/{path}"  # addresses in answers are relative
    self.connection.request(method, path, body, headers)
    answer = self.connection.getresponse()
    content = answer.read()
    if answer.headers.get("content-type", "").startswith("application/json"):
      content = json.loads(content)
    return answer.status, answer.headers, content


@contextlib.contextmanager
def running(index, model=None, workdir="", rerank="", **options):
  """Runs a server of an index on a free port; yields the port and its Service."""
  service = Service(index, workdir, poll=0.05, model=model, rerank=rerank)
  listener = socket.create_server(("127.0.0.1", 0))
  config = uvicorn.Config(
    apps.make(service, **options), http=LimitedProtocol, log_level="error", server_header=False
  )
  server = uvicorn.Server(config)
  thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
  thread.start()
  try:
    yield listener.getsockname()[1], service
  finally:
    server.should_exit = True
    thread.join()


@pytest.fixture
def server(index, model):
  with running(index, model) as (port, _):
    yield port


@pytest.fixture
def client(server):
  return Client(server)


@pytest.fixture
def page():
  """A tab of Chromium."""
  if CHROMIUM is None:
    pytest.skip("chromium is not installed")
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    yield page
    browser.close()
