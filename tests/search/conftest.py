"""A tiny model with made-up thresholds, a folder of drawn pictures, its index, and a server."""

import contextlib
import http.client
import json
import socket
import threading

import jax
import numpy as np
import pytest
import uvicorn
from PIL import Image

import xe_retrieval
from xe_retrieval import settings
from xe_retrieval.data import shapes, text
from xe_retrieval.retrieval import cutoff, indexing, sources
from xe_retrieval.serving import app as apps
from xe_retrieval.serving import state as states
from xe_retrieval.towers import dual_encoder, pretrained
from xe_retrieval.training import mesh, optimizers, step
from xe_retrieval.training.checkpoints import Checkpoints

CAPTIONS = [shapes.caption(0, "train", i) for i in range(40)]


def make_workdir(directory, seed=0):
  """As training leaves it, with random weights."""
  from configs import quickstart

  config = quickstart.get_config("cross_example_softmax")
  config.text.layers, config.text.width, config.text.heads, config.text.mlp = 1, 16, 2, 16
  config.image.size, config.image.stem_width = 16, 8
  config.image.depths, config.image.widths = (1,), (16,)
  config.embedding_dim = 8
  tokenizer = text.train(CAPTIONS, 200, config.text.tokens)
  tokenizer.save(directory / "tokenizer")
  config.text.vocab_size = tokenizer.vocab_size
  config = pretrained.configure(config)
  (directory / "config.json").write_text(settings.to_json(config))
  model = dual_encoder.from_config(config)
  random = np.random.default_rng(seed)
  like = jax.eval_shape(lambda: step.init_variables(config, model))
  variables = jax.tree.map(lambda x: random.normal(0, 0.5, x.shape).astype(x.dtype), like)
  variables["batch_stats"] = jax.tree.map(np.abs, variables.get("batch_stats", {}))
  optimizer = optimizers.make(config, variables["params"])
  checkpoints = Checkpoints(directory)
  checkpoints.save(step.init(config, variables, optimizer, mesh.make()))
  checkpoints.close()
  return directory


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
  """An evaluated model: precision rises from 0.1 to 0.9 with the score up to 0.999."""
  directory = make_workdir(tmp_path_factory.mktemp("model"))
  about = {"model": xe_retrieval.load(directory).fingerprint(), "dataset": "made up"}
  about |= {"split": "test", "step": 0, "queries": 100, "images": 100}
  rows = np.linspace(0, 1, 81)
  curve = {
    "positives": 1000,
    "threshold": [-1.0, *(0.999 * rows)],
    "precision": [0.1, *(0.11 + 0.79 * rows)],
    "recall": [1.0, *(0.99 - 0.9 * rows)],
    "returned": [10_000, *(5_000 - np.arange(81) * 60).tolist()],
  }
  cutoff.write(directory / cutoff.NAME, about, [], {"pairing": curve})
  return directory


@pytest.fixture(scope="session")
def model(workdir):
  return xe_retrieval.load(workdir)


def draw(folder, numbers):
  """Drawn scenes as files."""
  for i in numbers:
    path = folder / f"scene{i:03d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(shapes.picture(shapes.scene(0, "test", i))).save(path)


@pytest.fixture
def photos(tmp_path):
  folder = tmp_path / "photos"
  draw(folder, range(20))
  draw(folder / "deeper" / "still", range(20, 30))
  return folder


@pytest.fixture
def index(photos, model, workdir, tmp_path):
  indexing.update(tmp_path / "index", model, workdir, [sources.Folder(photos)])
  return tmp_path / "index"


class Client:
  """One kept connection to a server on this machine."""

  def __init__(self, port):
    self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

  def __call__(self, path, method="GET", body=None, headers=()):
    """-> status, headers, content (parsed if it is JSON)."""
    headers = dict(headers)
    if body is not None and not isinstance(body, bytes):
      body, headers = json.dumps(body), {"content-type": "application/json"} | headers
    self.connection.request(method, path, body, headers)
    answer = self.connection.getresponse()
    content = answer.read()
    if answer.headers.get("content-type", "").startswith("application/json"):
      content = json.loads(content)
    return answer.status, answer.headers, content


@contextlib.contextmanager
def running(index, model=None):
  """A server of an index, on a port of its own; gives the port and its state."""
  state = states.State(index, poll=0.05, model=model)
  listener = socket.create_server(("127.0.0.1", 0))
  config = uvicorn.Config(apps.make(state), log_level="error", server_header=False)
  server = uvicorn.Server(config)
  thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
  thread.start()
  try:
    yield listener.getsockname()[1], state
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
