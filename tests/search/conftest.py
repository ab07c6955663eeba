"""A tiny model with a made-up calibration, a folder of drawn images, and its index."""

import hashlib
import os
import secrets

import jax
import numpy as np
import pytest
from PIL import Image

import xe_retrieval
from xe_retrieval import config as config_lib
from xe_retrieval.calibration import artifact, counts
from xe_retrieval.calibration.calibrator import Calibrator
from xe_retrieval.data import mesh, shapes, tokenization
from xe_retrieval.search import image_sources, update
from xe_retrieval.search.stores import milvus_client
from xe_retrieval.towers import bank, dual_encoder, pretrained
from xe_retrieval.training import optimizers, step
from xe_retrieval.training.checkpoints import Checkpoints

CAPTIONS = [shapes.caption(0, "train", i) for i in range(40)]
UNFAMILIAR = "vsuqpvi"  # farther from all captions in the random model's features than most words


def make_workdir(directory, seed=0):
  """A workdir as training leaves it, with random weights."""
  from configs import quickstart

  config = quickstart.get_config("cross_example_softmax")
  config.text.layers, config.text.width, config.text.heads, config.text.mlp = 1, 16, 2, 16
  config.image.size, config.image.stem_width = 16, 8
  config.image.depths, config.image.widths = (1,), (16,)
  config.embedding_dim = 8
  tokenizer = tokenization.train(CAPTIONS, 200, config.text.tokens)
  tokenizer.save(directory / "tokenizer")
  config.text.vocab_size = tokenizer.vocab_size
  config = pretrained.configure(config)
  (directory / "config.json").write_text(config_lib.to_json(config))
  model = dual_encoder.from_config(config)
  random = np.random.default_rng(seed)
  like = jax.eval_shape(lambda: dual_encoder.init(config, model))
  variables = jax.tree.map(lambda x: random.normal(0, 0.5, x.shape).astype(x.dtype), like)
  variables["batch_stats"] = jax.tree.map(np.abs, variables.get("batch_stats", {}))
  optimizer = optimizers.make(config, variables["params"])
  checkpoints = Checkpoints(directory)
  checkpoints.save(step.init(config, variables, optimizer, mesh.make()))
  checkpoints.close()
  return directory


def calibration(model):
  """Made up: the probability rises from 0.12 to 0.9 over the random model's scores."""
  texts, features = model.embed_queries(CAPTIONS)
  centre = features.mean(axis=0)
  centred = features - centre
  centred /= np.linalg.norm(centred, axis=1, keepdims=True)
  images = model.embed_images([shapes.render(shapes.scene(0, "train", i)) for i in range(20)])
  known = bank.Bank(model.fingerprint(), CAPTIONS, centre, centred, texts, images, 0.5)
  # The least familiar of the captions has 0.49, UNFAMILIAR has 0.32.
  curve = np.array([-0.48, -0.28]), np.array([-2.0, 2.2])
  calibrator = Calibrator(np.array([]), [curve], np.linspace(0.4, 0.45, 21))
  random = np.random.default_rng(0)
  logits = random.uniform(-2, 2.2, (100, 100))  # 100 captions × 100 images
  relevant = random.random(logits.shape) < 1 / (1 + np.exp(-logits))
  passes = logits[:, :, None] >= counts.LEVELS  # [100, 100, L]
  right, wrong = passes & relevant[:, :, None], passes & ~relevant[:, :, None]
  counted = counts.collect(
    relevant=right.sum(axis=1),
    own=right[np.arange(100), np.arange(100)],
    irrelevant=wrong.sum(axis=1),
    group=np.arange(100),
    images=100,
    positives=int(relevant.sum()),
  )
  about = {"model": known.model, "dataset": "made up", "split": "validation", "step": 0}
  about |= {"queries": 100, "images": 100, "distractors": []}
  return artifact.Calibration(about, [artifact.Meaning("captions", calibrator, counted)], known)


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
  """A model that was calibrated."""
  directory = make_workdir(tmp_path_factory.mktemp("model"))
  calibration(xe_retrieval.load(directory)).write(directory)
  return directory


@pytest.fixture(scope="session")
def model(workdir):
  return xe_retrieval.load(workdir)


def draw(folder, numbers):
  """Writes drawn scenes as PNG files."""
  for i in numbers:
    path = folder / f"scene{i:03d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(shapes.render(shapes.scene(0, "test", i))).save(path)


@pytest.fixture
def photos(tmp_path):
  folder = tmp_path / "photos"
  draw(folder, range(20))
  draw(folder / "deeper" / "still", range(20, 30))
  return folder


def release(index):
  """Lets other processes open the vectors: milvus-lite holds them until its process ends."""
  if (file := index / "vectors.db").exists():
    import milvus_lite

    milvus_lite.server_manager_instance.release_server(str(file))


KINDS = ("files", "milvus", "server")  # server: that of XE_MILVUS, as in http://127.0.0.1:19530
PREFIX = f"xe_test_{secrets.token_hex(4)}"  # of the collections there that are dropped in the end


def place(kind, path) -> str:
  """--store of an index at `path`."""
  if kind == "files":
    return "files"
  if kind == "milvus":
    pytest.importorskip("milvus_lite")
    return f"milvus:{path / 'vectors.db'},photos"
  if not os.environ.get("XE_MILVUS"):
    pytest.skip("XE_MILVUS names no Milvus server, as in XE_MILVUS=http://127.0.0.1:19530")
  name = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
  return f"milvus:{os.environ['XE_MILVUS']},{PREFIX}_{name}"


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
  """--store of an index at tmp_path/index: tests that use it run over all kinds of stores."""
  yield place(request.param, tmp_path / "index")
  release(tmp_path / "index")


@pytest.fixture(scope="session", autouse=True)
def drop_collections():
  yield
  if uri := os.environ.get("XE_MILVUS"):
    client = milvus_client.connect(".", uri)
    for name in client.list_collections():
      if name.startswith(PREFIX):
        client.drop_collection(name)


@pytest.fixture
def index(photos, model, workdir, tmp_path, store):
  sources = [image_sources.Folder(photos)]
  update.update_index(tmp_path / "index", model, workdir, sources, store=store)
  release(tmp_path / "index")
  return tmp_path / "index"
