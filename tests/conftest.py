"""Eight virtual CPU devices, one compilation cache, and a tiny config for all tests."""

import os
import pathlib

# Collectives block a thread of XLA's pool, which has one per core or device: several programs at
# once can starve each other and abort. So more threads, and one program at a time.
os.environ["NPROC"] = "32"

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
CACHE = ROOT / ".cache"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
  return str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def config(data_dir):
  """The quickstart with towers that compile in a second."""
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
