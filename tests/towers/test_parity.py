"""Each family, layer by layer, against transformers' models in PyTorch."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.towers.conftest import shapes
from xe_retrieval.towers import dual_encoder, families, pretrained
from xe_retrieval.towers.families import side_by_side
from xe_retrieval.towers.transformer import Transformer

HERE = pathlib.Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "weights"
TINY = ["bert", "distilbert", "mpnet", "roberta", "clip_text", "siglip_text"]
TINY += ["resnet_v1", "resnet_v15", "resnet_basic"]
TINY += ["vit", "dinov2", "dinov2_registers", "clip_vision", "siglip_vision"]
FULL = ["bert_base", "mpnet_base", "clip_text_base", "siglip_text_base", "resnet50", "resnet18"]
FULL += ["vit_base", "dinov2_small", "clip_vision_base", "siglip_vision_base"]
REAL = ["minilm-l6", "resnet50-imagenet"]
REAL += ["all-mpnet-base-v2", "vit-s14"]  # where XE_RETRIEVAL_WEIGHTS says, see real_weights.py

torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


@pytest.mark.parametrize("name", TINY)
def test_stored_outputs(tiny, name):
  outputs = np.load(HERE / "references" / name / "outputs.npz")
  assert_equal(outputs, ours(tiny, HERE / "references" / name, outputs))


@pytest.mark.parametrize("model_type", ["xlm-roberta", "camembert"])
def test_names_of_robertas_architecture(tiny, model_type, tmp_path):
  folder = pathlib.Path(shutil.copytree(HERE / "references" / "roberta", tmp_path / "tower"))
  fields = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(fields | {"model_type": model_type}))
  outputs = np.load(folder / "outputs.npz")
  assert_equal(outputs, ours(tiny, folder, outputs))


@torch
@pytest.mark.parametrize("name", TINY)
def test_live_outputs(tiny, name, live):
  outputs = np.load(live() / name / "outputs.npz")
  assert_equal(outputs, ours(tiny, live() / name, outputs))


@torch
@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_live_outputs_of_real_size(tiny, name, live):
  outputs = np.load(live("--full") / name / "outputs.npz")
  assert_equal(outputs, ours(tiny, live("--full") / name, outputs))


@pytest.mark.parametrize("name", REAL)
def test_fingerprints_of_real_weights(tiny, name):
  given = os.environ.get("XE_RETRIEVAL_WEIGHTS", "")
  folders = [folder for folder in (SHARED / name, pathlib.Path(given, name)) if folder.is_dir()]
  if not folders:
    pytest.skip("these weights are not at hand")
  stored = np.load(HERE / "references" / f"{name}.npz")
  if "tokens" in stored:
    inputs = dict(stored)
  else:
    pixels = np.random.default_rng(0).normal(size=(2, 224, 224, 3)).astype(np.float32)
    inputs = {**stored, "pixels": pixels}
  outputs = ours(tiny, folders[0], inputs)
  assert_equal(stored, {part: fingerprint(value) for part, value in outputs.items()})


@torch
def test_transformers_loads_what_export_writes(tiny, tmp_path):
  """Every family: weights in, exported, and run by transformers' own class."""
  stored = {name: np.load(HERE / "references" / name / "outputs.npz") for name in TINY}
  for name, outputs in stored.items():
    encoder = "text" if "tokens" in outputs else "image"
    source = str(HERE / "references" / name)
    config = pretrained.configure(tiny({f"{encoder}.pretrained": source, "text.tokens": 12}))
    model = dual_encoder.from_config(config)
    variables = pretrained.load(config, shapes(config))
    family = families.of(config, encoder)
    tensors = family.to_tensors(side_by_side.take(variables, encoder, ()))
    tensors = {family.prefix + key: value for key, value in tensors.items()}
    (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    theirs = family.export(getattr(model, encoder).tower)
    if name == "siglip_vision":  # 44 pixels hold 5 patches of 8, exported as 40
      assert theirs.image_size == 40
      theirs.image_size = 44  # so that the same pixels are drawn
    theirs.save_pretrained(tmp_path / name)
  command = [sys.executable, HERE / "make_references.py", "--out", tmp_path]
  subprocess.run([*command, *(tmp_path / name for name in TINY)], check=True, capture_output=True)
  for name, outputs in stored.items():
    found = dict(np.load(tmp_path / f"{name}.npz"))
    inputs = found.pop("tokens", None)
    assert inputs is None or np.array_equal(inputs, outputs["tokens"]), name
    expected = {part: fingerprint(outputs[part]) for part in found}
    assert_equal(expected, found)


def ours(tiny, folder, inputs):
  """{part: output} of our tower with the weights of a folder, loaded as in training."""
  encoder, x = ("text", inputs["tokens"]) if "tokens" in inputs else ("image", inputs["pixels"])
  config = pretrained.configure(tiny({f"{encoder}.pretrained": str(folder), "text.tokens": 12}))
  if encoder == "image":
    config.image.size = x.shape[1]
  model = dual_encoder.from_config(config)
  variables = pretrained.load(config, jax.eval_shape(lambda: dual_encoder.init(config, model)))
  tower = getattr(model, encoder).tower
  variables = {name: tree[encoder]["tower"] for name, tree in variables.items() if encoder in tree}
  everywhere = tower
  if isinstance(tower, Transformer):  # mean: the last layer of all tokens, not of the pooled alone
    everywhere = tower.clone(pooling="mean") if tower.pooling != "attention" else tower

  @jax.jit
  def apply(variables, x):
    parts = [part for part in tower.parts() if part != "output"]
    filter = lambda module, _: module.name in parts  # noqa: E731
    _, state = everywhere.apply(variables, x, capture_intermediates=filter, mutable="intermediates")
    found = {part: state["intermediates"][part]["__call__"][0] for part in parts}
    if isinstance(tower, Transformer):
      found["embeddings"] = found["embeddings"][0]  # beside it, masks
    return found | ({"pooled": tower.apply(variables, x)} if "pooled" in inputs else {})

  return apply(variables, x)


def assert_equal(theirs, ours):
  """Within 1e-4, relative to the largest activation where that exceeds one."""
  assert set(ours) == set(theirs) - {"tokens", "pixels"}
  for part, value in ours.items():
    atol = 1e-4 * max(1, np.abs(theirs[part]).max())
    np.testing.assert_allclose(value, theirs[part], rtol=0, atol=atol, err_msg=part)


def fingerprint(x):
  """Sixteen values of an array, its mean and its standard deviation, as in make_references.py."""
  x = np.asarray(x)
  return np.array([*x.ravel()[:: x.size // 16][:16], x.mean(), x.std()], np.float32)


@pytest.fixture(scope="session")
def live(tmp_path_factory):
  """live(*flags) runs make_references.py with the installed torch and returns its folder."""
  folders = {}

  def run(*args):
    if args not in folders:
      folders[args] = tmp_path_factory.mktemp("references")
      command = [sys.executable, HERE / "make_references.py", "--out", folders[args], *args]
      subprocess.run(command, check=True, capture_output=True)
    return folders[args]

  return run
