"""A config of two tiny towers, and tiny checkpoints that a test may change."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from xe_retrieval.towers import dual_encoder, pretrained

REFERENCES = pathlib.Path(__file__).parent / "references"


@pytest.fixture(scope="session")
def tiny():
  """tiny(**{"text.pooling": "mean"}) is the tiny config with that field changed."""

  def make(changes=None, **more):
    config = ConfigDict(
      dict(
        seed=0,
        embedding_dim=8,
        dtype="float32",
        remat=False,
        text=dict(
          pretrained="",
          vocab_size=20,
          tokens=6,
          layers=2,
          width=16,
          heads=2,
          mlp=32,
          pooling="cls",
          dropout=0.1,
          feature_dropout=0.0,
          freeze="none",
        ),
        image=dict(
          pretrained="",
          size=16,
          depths=(1, 1),
          widths=(8, 16),
          block="bottleneck",
          stem="imagenet",
          stem_width=8,
          downsample_in_bottleneck=False,
          batch_norm="sync",
          mean=(0.5, 0.5, 0.5),
          std=(0.25, 0.25, 0.25),
          freeze="none",
        ),
      )
    )
    config.update_from_flattened_dict({**(changes or {}), **more})
    return config.lock()

  return make


@pytest.fixture
def load(tiny):
  """load(encoder, path) -> (config, variables of the tower), as training does it."""

  def run(encoder, path):
    config = pretrained.configure(tiny({f"{encoder}.pretrained": str(path)}))
    variables = pretrained.load(config, shapes(config))
    return config, {c: tree[encoder]["tower"] for c, tree in variables.items() if encoder in tree}

  return run


def shapes(config):
  model = dual_encoder.from_config(config)
  return jax.eval_shape(
    model.init,
    jax.random.key(0),
    np.zeros((1, config.text.tokens), np.int32),
    np.zeros((1, config.image.size, config.image.size, 3), np.uint8),
  )


@pytest.fixture
def bert(tmp_path):
  """A copy of the tiny BERT that a test may change."""
  return pathlib.Path(shutil.copytree(REFERENCES / "bert", tmp_path / "bert"))


@pytest.fixture
def resnet(tmp_path):
  return pathlib.Path(shutil.copytree(REFERENCES / "resnet_v15", tmp_path / "resnet"))


def rewrite(folder, change):
  """Replace the weights of a folder by `change` of them."""
  path = folder / "model.safetensors"
  tensors = change(load_file(path))
  path.unlink()
  save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
  return folder
