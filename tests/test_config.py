"""Invalid values and misspelt fields give one sentence that names the field."""

import importlib.util
import json
import subprocess
import sys

import pytest

from configs import cc, cc_large, clip, coco, flickr8k, own, quickstart
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


@pytest.mark.parametrize("batch", [512, 4_096, 32_768])
def test_large_batches_keep_the_sum_of_the_learning_rates(batch):
  paper, large = cc.get_config("snm"), cc_large.get_config(f"snm,{batch}")
  assert (large.loss, large.batch_size) == ("snm", batch)
  for tower in ("text", "image"):
    before, after = (c[tower].learning_rate * c.steps for c in (paper, large))
    assert abs(after / before - 1) < 1e-3
  assert large.steps == round(25_000 / (batch / 512) ** 0.5)
  loop.validate(large)


@pytest.mark.parametrize("loss", losses.names())
def test_every_loss_is_a_valid_argument_of_every_config(loss):
  for module in (cc, cc_large, quickstart, flickr8k, coco):
    loop.validate(module.get_config(loss))


def data_set(directory, images, split="train"):
  """The one file of a data set that configs/own.py reads."""
  version = directory / "captions" / "mine" / "1.0.0"
  version.mkdir(parents=True)
  splits = [{"name": split, "shardLengths": [str(images // 2), str(images - images // 2)]}]
  (version / "dataset_info.json").write_text(json.dumps({"splits": splits}))
  return version.parent


@pytest.mark.parametrize(
  ("images", "batch", "steps"),
  [(1, 1, 240), (177, 128, 332), (5_000, 1_024, 1_172), (37_334, 1_024, 1_984)]
  + [(200_000, 1_024, 3_018), (20_000_000, 1_024, 9_543)],
)
def test_own_data_decide_on_batch_and_steps(tmp_path, images, batch, steps):
  config = own.get_config(str(data_set(tmp_path, images)))
  assert (config.data.dir, config.data.name) == (str(tmp_path), "captions/mine")
  assert (config.batch_size, config.steps) == (batch, steps)
  assert config.batch_size <= images and config.steps <= 4 * config.eval_every
  assert config.text.freeze == config.image.freeze == "all"  # features are computed once
  loop.validate(config)


@pytest.mark.parametrize(("images", "batch", "steps"), [(177, 128, 35), (100_000, 1_024, 500)])
def test_few_pairs_adapt_a_clip_for_few_steps(tmp_path, images, batch, steps):
  config = clip.get_config(f"{data_set(tmp_path, images)},snm")
  assert (config.data.dir, config.data.name, config.loss) == (str(tmp_path), "captions/mine", "snm")
  assert (config.batch_size, config.steps) == (batch, steps)
  assert config.text.warmup_steps < steps and config.eval_every == steps
  alone = clip.get_config()
  assert (alone.batch_size, alone.steps, alone.data.name) == (1_024, 500, "captions/mine")


def test_own_data_that_are_not_there(tmp_path):
  with pytest.raises(ValueError, match=r"holds no data set; .* xe_retrieval\.prepare .*name=mine"):
    own.get_config(str(tmp_path / "captions" / "mine"))
  with pytest.raises(ValueError, match="no images in its split 'train'"):
    own.get_config(str(data_set(tmp_path, 4, "test")))
  other = own.get_config(f"{data_set(tmp_path / 'more', 40)},snm")
  assert other.loss == "snm"


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
    ("image.size", 60, r"config\.image\.size=60 is not divisible into patches of 8 pixels"),
    ("text.dropout", 1.5, r"config\.text\.dropout=1\.5 should be a share in \[0, 1\)"),
    ("text.warmup_steps", 10_000, r"config\.text\.warmup_steps=10000 should be from 0 to steps="),
    ("image.warmup_steps", -1, r"config\.image\.warmup_steps=-1 should be from 0 to steps="),
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


@pytest.mark.parametrize(
  "module, heavy",
  [
    ("xe_retrieval", ("jax", "tensorflow", "transformers")),
    ("xe_retrieval.data.feed.workers", ("jax", "tensorflow", "transformers")),
    ("xe_retrieval.training.loop", ("tensorflow",)),  # only process 0 needs it, for TensorBoard
  ],
)
def test_imports_no_heavy_library(module, heavy):
  code = f"import sys, {module}; print(len({set(heavy)} & set(sys.modules)))"
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == "0"
