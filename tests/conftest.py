"""Eight virtual CPU devices, one compilation cache, and a tiny config for all tests."""

import os
import pathlib
import socket
import subprocess
import sys
import time

# CPU collectives block a thread of XLA's pool, which has one per core or device: concurrent
# programs can deadlock and abort. Hence more threads, and one program at a time.
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"  # also where libtpu or CUDA is installed
# In the environment, so that subprocesses share the compilation cache.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parents[1] / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
# The suite mostly compiles: without LLVM's optimisation it takes about half as long. Values are
# those of the same programs; the benchmarks and the quickstart run what users run. On busy cores a
# device may wait for the others of a collective for longer than the 40 s after which XLA aborts.
os.environ["XLA_FLAGS"] = (
  f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 "
  "--xla_cpu_collective_call_terminate_timeout_seconds=300"
)

import jax
import pytest
from etils import epath

ROOT = pathlib.Path(__file__).parents[1]
CACHE = ROOT / ".cache"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_cpu_enable_async_dispatch", False)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
  return str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def config(data_dir):
  return tiny(data_dir)


def tiny(data_dir):
  """The quickstart's config with towers that compile in a second."""
  from configs import quickstart

  config = quickstart.get_config("cross_example_softmax")
  config.steps, config.batch_size = 4, 16
  config.data.name, config.data.dir = "shapes/64", data_dir
  config.text.layers, config.text.width, config.text.heads, config.text.mlp = 1, 16, 2, 16
  config.text.warmup_steps = config.image.warmup_steps = 1
  config.image.size, config.image.stem_width = 16, 8
  config.image.depths, config.image.widths = (1,), (16,)
  config.embedding_dim = 8
  config.log_every = config.eval_every = config.checkpoint_every = 2
  return config


@pytest.fixture(scope="session")
def object_store(tmp_path_factory):
  """Environment variables by which gs://bucket is a server on this machine, for every library."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  with (tmp_path_factory.mktemp("bucket") / "log").open("wb") as log:
    command = [sys.executable, ROOT / "tests" / "object_store.py", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=log)
  for _ in range(600):
    with socket.socket() as client:
      if not client.connect_ex(("localhost", port)):
        break
    assert server.poll() is None, "the object store has ended"
    time.sleep(0.1)
  url = f"http://localhost:{port}"
  yield {
    "STORAGE_EMULATOR_HOST": url,  # gcsfs, google-cloud-storage
    "TENSORSTORE_GCS_HTTP_URL": url,
    "GOOGLE_CLOUD_PROJECT": "project",
    "NO_GCE_CHECK": "true",  # for credentials; the server wants none
  }
  server.terminate()
  server.wait()


@pytest.fixture
def bucket(object_store, monkeypatch, tmp_path):
  """A path gs://bucket/… that no other test has used."""
  for name, value in object_store.items():
    monkeypatch.setenv(name, value)
  return epath.Path(f"gs://bucket/{tmp_path.name}")
