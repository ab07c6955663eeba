"""A config of two tiny towers."""

import pytest
from ml_collections import ConfigDict


@pytest.fixture(scope="session")
def tiny():
  """tiny(**{"text.pooling": "mean"}) is the tiny config with that field changed."""

  def make(changes=None, **more):
    config = ConfigDict(
      dict(
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
