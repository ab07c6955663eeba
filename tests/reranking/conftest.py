"""A tiny dual encoder, and a re-ranker trained on it for a few steps."""

import jax
import pytest

from configs import flickr8k_rerank
from tests.conftest import tiny
from xe_retrieval import main
from xe_retrieval.reranking import first_stage

ONE = jax.devices()[:1]


@pytest.fixture(scope="session")
def first_stage_dir(data_dir, tmp_path_factory):
  config = tiny(data_dir)
  config.steps = config.eval_every = config.checkpoint_every = 30
  config.text.freeze = config.image.freeze = "all"
  config.image.size, config.image.depths, config.image.widths = 32, (1, 1), (16, 16)
  workdir = tmp_path_factory.mktemp("first_stage")
  main.train(config, workdir, ONE)
  return workdir


@pytest.fixture(scope="session")
def first(first_stage_dir):
  return first_stage.FirstStage(first_stage_dir)


def rerank_config(first_stage_dir):
  config = flickr8k_rerank.get_config()
  config.first_stage = str(first_stage_dir)
  config.steps, config.batch_size = 4, 8
  config.mined, config.hard, config.candidates = 5, 2, 6
  joint = config.joint
  joint.layers, joint.width, joint.heads, joint.mlp, joint.compressed = 1, 16, 2, 16, 3
  joint.warmup_steps, joint.learning_rate = 1, 1e-2
  config.validation_captions, config.validation_candidates = 10, 4
  config.log_every = config.eval_every = config.checkpoint_every = 2
  return config


@pytest.fixture
def config(first_stage_dir):
  return rerank_config(first_stage_dir)


@pytest.fixture(scope="session")
def trained(first_stage_dir, tmp_path_factory):
  """-> workdir, state after the last step."""
  workdir = tmp_path_factory.mktemp("reranker")
  return workdir, jax.device_get(main.train(rerank_config(first_stage_dir), workdir, ONE))
