"""Invalid values and misspelt fields give one sentence that names the field."""

import importlib.util
import subprocess
import sys

import pytest

from configs import cc, flickr8k, flickr8k_large, quickstart
from tests.conftest import ROOT
from xe_retrieval import config as config_lib
from xe_retrieval import losses
from xe_retrieval.training import loop


def test_the_papers_recipe_to_the_letter():
  config = cc.get_config("cross_example_negative_mining")
  assert (config.loss, config.steps, config.batch_size) == (
    "cross_example_negative_mining", 25_000, 512,
  )  # fmt: skip
  assert (config.scale, config.keep, config.embedding_dim) == (20.0, 0.5, 128)
  text, image = config.text, config.image
  assert (text.layers, text.width, text.tokens, text.pooling) == (12, 768, 32, "cls")
  assert (text.optimizer, text.learning_rate, text.warmup_steps) == ("adamw", 1e-4, 1_500)
  assert (image.depths, image.widths[-1]) == ((3, 4, 6, 3), 2048)
  assert (image.optimizer, image.learning_rate, image.end_learning_rate) == ("sgd", 3e-3, 5e-4)


@pytest.mark.parametrize("loss", losses.names())
def test_every_loss_is_a_valid_argument_of_every_config(loss):
  for module in (cc, quickstart, flickr8k, flickr8k_large):
    loop.validate(module.get_config(loss))


@pytest.mark.parametrize(
  ("field", "value", "sentence"),
  [
    ("loss", "softmax", r"config\.loss='softmax' should be one of sampled_softmax"),
    ("keep", 0.0, r"config\.keep=0\.0 .* \(0, 1\]"),
    ("keep", 1.5, r"config\.keep=1\.5"),
    ("scale", -1.0, r"config\.scale=-1\.0 should be above 0"),
    ("loss_implementation", "sparse", r"config\.loss_implementation='sparse' .* dense, streaming"),
    ("text.feature_dropout", 1.0, r"config\.text\.feature_dropout=1\.0 should be a share in"),
    ("steps", 0, r"config\.steps=0 should be at least 1"),
    ("batch_size", 12, r"config\.batch_size=12 does not divide over 8 devices; 8 would"),
    ("micro_batch", 12, r"config\.micro_batch=12 should divide batch_size=128"),
    ("micro_batch", 4, r"config\.micro_batch=4 .* divisible by the 8 device"),
    ("ema_decay", 1.0, r"config\.ema_decay=1\.0 should be in \[0, 1\)"),
    ("profile_steps", "10-15", r"config\.profile_steps='10-15' should be .* as 10:15"),
    ("data.augment", "flip", r"config\.data\.augment='flip' should be one of none"),
    ("text.optimizer", "adam", r"config\.text\.optimizer='adam' should be one of adamw, sgd"),
    ("image.freeze", "some", r"config\.image\.freeze='some'"),
    ("text.pooling", "max", r"config\.text\.pooling='max'"),
  ],
)
def test_invalid_values(field, value, sentence):
  config = quickstart.get_config()
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=sentence):
    loop.validate(config, devices=8)


def test_json_round_trip_and_difference():
  config = cc.get_config()
  again = config_lib.from_json(config_lib.to_json(config))
  assert config_lib.difference(config, again) == []
  again.image.size = 160
  assert config_lib.difference(config, again) == ["config.image.size: 224 → 160"]


@pytest.mark.parametrize(
  ("argument", "sentence"),
  [
    ("--config.batchsize=64", "no such field; did you mean 'batch_size'?"),
    ("--config.image.sise=64", "no such field; did you mean 'size'?"),
    ("--config.steps=many", "--config.steps=many"),
    ("runs/a", "unexpected argument 'runs/a'"),
  ],
)
def test_misspelt_arguments_give_one_sentence(argument, sentence):
  command = [sys.executable, "-m", "xe_retrieval.main", "--workdir=unused"]
  command += ["--config=configs/quickstart.py:cross_example_softmax", argument]
  out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert out.returncode == 1
  assert sentence in out.stderr and "Traceback" not in out.stderr


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_is_required_only_if_configured():
  config = quickstart.get_config()
  config.wandb = "project"
  with pytest.raises(ValueError, match="needs a package: pip install wandb"):
    loop.validate(config)


def test_importing_the_package_imports_no_heavy_library():
  code = (
    "import sys, xe_retrieval; print(len({'jax', 'tensorflow', 'transformers'} & set(sys.modules)))"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == "0"
