"""Every broken checkpoint is a clear error."""

import numpy as np
import pytest

from tests.towers.conftest import rewrite


def without(name):
  return lambda tensors: {n: v for n, v in tensors.items() if n != name}


def replaced(name, value):
  return lambda tensors: {**tensors, name: value(tensors.get(name))}


@pytest.mark.parametrize(
  "change, message",
  [
    (without("encoder.layer.2.output.dense.bias"), "lacks encoder.layer.2.output.dense.bias"),
    (
      replaced("encoder.layer.3.output.dense.bias", lambda _: np.zeros(24, np.float32)),
      "has no use for encoder.layer.3.output.dense.bias",
    ),
    (
      replaced("encoder.layer.0.intermediate.dense.weight", lambda x: x[:, :-1]),
      r"encoder.layer.0.intermediate.dense.weight has shape \(36, 23\), expected \(36, 24\)",
    ),
    (
      replaced("embeddings.LayerNorm.bias", lambda x: x * np.nan),
      "embeddings.LayerNorm.bias holds NaN or infinity",
    ),
  ],
)
def test_weights_that_do_not_fit(load, bert, change, message):
  with pytest.raises(ValueError, match=message):
    load("text", rewrite(bert, change))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(load, bert, keep):
  path = bert / "model.safetensors"
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"model.safetensors is corrupt or half downloaded"):
    load("text", bert)


@pytest.mark.parametrize(
  "file, text, message",
  [
    ("config.json", "{", "config.json is not readable as JSON"),
    (
      "config.json",
      '{"model_type": "gpt2"}',
      "model_type is 'gpt2'; text towers can be bert, distilbert, mpnet, roberta",
    ),
    ("config.json", '{"hidden_act": "silu"}', "hidden_act is 'silu'; .* one of 'gelu', 'gelu_new'"),
    ("config.json", '{"max_position_embeddings": 4}', "config.text.tokens=6, but .* 4 positions"),
    ("config.json", None, "holds no config.json: it is not a pretrained text tower"),
    ("model.safetensors", None, "holds no weights: expected one of model.safetensors.index.json"),
  ],
)
def test_directories_that_are_not_a_checkpoint(load, bert, file, text, message):
  (bert / file).write_text(text) if text else (bert / file).unlink()
  with pytest.raises(ValueError, match=message):
    load("text", bert)
