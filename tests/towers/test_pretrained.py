"""Every checkpoint format gives the same variables."""

import functools
import importlib.util
import json
import operator
import pathlib
import re
import shutil
import sys

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.towers.conftest import REFERENCES, rewrite, shapes
from xe_retrieval.towers import dual_encoder, families, pretrained, weight_files

with_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="no torch installed")


def test_architecture_comes_from_the_checkpoint(tiny, resnet):
  (resnet / "preprocessor_config.json").write_text(
    json.dumps({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.3]})
  )
  before = tiny({"text.pretrained": str(REFERENCES / "bert"), "image.pretrained": str(resnet)})
  config = pretrained.configure(before)
  assert (config.text.vocab_size, config.text.layers, config.text.width) == (40, 3, 24)
  assert (config.text.heads, config.text.mlp, config.text.positions) == (3, 36, 12)
  assert (config.text.tokens, config.text.dropout) == (6, 0.1)
  assert (config.image.depths, config.image.widths, config.image.stem_width) == (
    (1, 2),
    (16, 32),
    8,
  )
  assert (config.image.stem, config.image.block) == ("imagenet", "bottleneck")
  np.testing.assert_allclose(config.image.mean, (0.5, 0.4, 0.3))
  np.testing.assert_allclose(config.image.std, (0.1, 0.2, 0.3))
  assert before.text.layers == 2 and config.is_locked
  assert pretrained.configure(config) == config
  assert pretrained.configure(tiny()) == tiny()


@pytest.mark.parametrize(
  "fields, mean, std",
  [
    ({"do_normalize": False}, 0.0, 1.0),
    ({"image_mean": [127.5] * 3, "image_std": [51.0] * 3, "do_rescale": False}, 0.5, 0.2),
    ({"image_mean": [1.0] * 3, "image_std": [1.0] * 3, "rescale_factor": 1 / 127.5}, 0.5, 0.5),
  ],
)
def test_normalisation_is_for_pixels_from_0_to_1(tiny, resnet, fields, mean, std):
  (resnet / "preprocessor_config.json").write_text(json.dumps(fields))
  config = pretrained.configure(tiny({"image.pretrained": str(resnet)}))
  np.testing.assert_allclose(config.image.mean, (mean,) * 3, rtol=1e-6)
  np.testing.assert_allclose(config.image.std, (std,) * 3, rtol=1e-6)


def test_projections_and_other_towers_stay(tiny):
  config = pretrained.configure(tiny({"text.pretrained": str(REFERENCES / "bert")}))
  before = shapes(config)
  after = pretrained.load(config, before)
  for place in (("image",), ("text", "projection")):
    pair = [functools.reduce(operator.getitem, place, x["params"]) for x in (after, before)]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
  chex.assert_trees_all_equal_shapes_and_dtypes(
    after["params"]["text"]["tower"], before["params"]["text"]["tower"]
  )
  assert pretrained.load(tiny(), before) == before


TOWERS = [  # reference, encoder, tensors that no tower has
  ("bert", "text", ()),
  ("distilbert", "text", ()),
  ("mpnet", "text", ()),
  ("roberta", "text", ()),
  ("clip_text", "text", ()),
  ("siglip_text", "text", ()),
  ("resnet_basic", "image", ()),
  ("resnet_v1", "image", ()),
  ("vit", "image", ()),
  ("dinov2", "image", ("embeddings.mask_token",)),
  ("dinov2_registers", "image", ("embeddings.mask_token",)),
  ("clip_vision", "image", ()),
  ("siglip_vision", "image", ()),
]


@pytest.mark.parametrize("name, encoder, dropped", TOWERS)
def test_exported_tensors_equal_the_loaded_ones(load, name, encoder, dropped):
  config, variables = load(encoder, REFERENCES / name)
  stored = load_file(REFERENCES / name / "model.safetensors")
  family = families.of(config, encoder)
  chex.assert_trees_all_equal(
    family.to_tensors(variables), {n: v for n, v in stored.items() if n not in dropped}
  )
  theirs = json.loads((REFERENCES / name / "config.json").read_text())
  ours = family.export(getattr(dual_encoder.from_config(config), encoder).tower).to_dict()
  unused = ("dropout", "token_id", "dtype", "version", "mask_token", "layerscale", "projection_dim")
  unused += ("use_cache", "initializer", "is_decoder", "cross_attention", "embedding_type")
  for sizes in (ours, theirs):  # an image may have a rest beside its patches, as 44 pixels have
    sizes["image_size"] = sizes.get("image_size", 0) // sizes.get("patch_size", 1)
  differing = {k for k in theirs if theirs[k] != ours.get(k, ...)}
  assert not {k for k in differing if not any(part in k for part in unused)}


def test_names_within_transformers_5(load, tmp_path):
  """As state_dict() has them; files hold the older ones."""
  newer = {".attention.attention.query.": ".attention.q_proj.", "encoder.layer.": "layers."}

  def renamed(tensors):
    out = {}
    for name, value in tensors.items():
      for old, new in newer.items():
        name = name.replace(old, new)
      out[name.replace(".intermediate.dense.", ".mlp.fc1.")] = value
    return out

  folder = pathlib.Path(shutil.copytree(REFERENCES / "vit", tmp_path / "vit"))
  _, expected = load("image", folder)
  chex.assert_trees_all_equal(load("image", rewrite(folder, renamed))[1], expected)


def test_shards(load, bert):
  _, whole = load("text", bert)
  tensors = load_file(bert / "model.safetensors")
  names = sorted(tensors)
  files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
  (bert / "model.safetensors").unlink()
  for file in set(files.values()):
    save_file({name: tensors[name] for name in names if files[name] == file}, bert / file)
  index = bert / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": files}))
  chex.assert_trees_all_equal(load("text", bert)[1], whole)

  index.write_text(json.dumps({"weight_map": {**files, "more": files[names[0]]}}))
  with pytest.raises(ValueError, match="promises tensors that its files do not hold: more"):
    load("text", bert)
  index.write_text(json.dumps({"weight_map": files}))
  (bert / files[names[0]]).unlink()
  with pytest.raises(ValueError, match=f"names {files[names[0]]}, which is not in"):
    load("text", bert)
  index.write_text("{")
  with pytest.raises(ValueError, match="is not an index of weights"):
    load("text", bert)


def test_heads_half_precision_and_old_names(load, bert):
  _, plain = load("text", bert)

  def with_head(tensors):
    tensors = {
      "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
      for name, value in tensors.items()
    }
    tensors["bert.embeddings.position_ids"] = np.arange(12)[None]
    tensors["bert.pooler.dense.weight"] = tensors["cls.predictions.bias"] = np.zeros(3, np.float32)
    return {name: value.astype(np.float16) for name, value in tensors.items()}

  _, headed = load("text", rewrite(bert, with_head))
  chex.assert_trees_all_equal_dtypes(headed, plain)
  chex.assert_trees_all_close(headed, plain, rtol=1e-3, atol=1e-6)


def google_names(tensors):
  """Hugging Face names and layout -> those of the original release."""
  renamed = {}
  for name, value in tensors.items():
    if name.endswith("_embeddings.weight"):
      name = name.removesuffix(".weight")
    elif "LayerNorm" in name:
      name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
      name = name.replace("LayerNorm.bias", "LayerNorm.beta")
    elif name.endswith(".weight"):
      name, value = name.replace(".weight", ".kernel"), value.T
    renamed["bert/" + re.sub(r"layer\.(\d+)", r"layer_\1", name).replace(".", "/")] = value
  return renamed


def test_google_checkpoint(load, bert):
  import tensorflow as tf

  _, expected = load("text", bert)
  tensors = google_names(load_file(bert / "model.safetensors"))
  tensors["cls/seq_relationship/output_bias"] = np.zeros(2, np.float32)
  tensors["bert/pooler/dense/kernel/adam_m"] = np.zeros(2, np.float32)
  tensors["global_step"] = np.array(3)
  prefix = str(bert / "bert_model.ckpt")
  tf.raw_ops.SaveV2(
    prefix=prefix,
    tensor_names=list(tensors),
    shape_and_slices=[""] * len(tensors),
    tensors=list(tensors.values()),
  )
  (bert / "model.safetensors").unlink()
  fields = json.loads((bert / "config.json").read_text())
  (bert / "config.json").unlink()
  fields = {key: fields[key] for key in fields if key not in ("model_type", "architectures")}
  (bert / "bert_config.json").write_text(json.dumps(fields))
  chex.assert_trees_all_equal(load("text", bert)[1], expected)

  data = next(bert.glob("*.data-*"))
  data.write_bytes(data.read_bytes()[:1000])
  with pytest.raises(ValueError, match="bert_model.ckpt is corrupt or half downloaded"):
    load("text", bert)


def torchvision_names(tensors):
  """Hugging Face names -> those of torchvision.models.resnet."""
  kinds = {"convolution": "conv", "normalization": "bn"}
  numbers = {"convolution": 0, "normalization": 1}
  renamed = {}
  for name, value in tensors.items():
    match name.split("."):
      case ["embedder", "embedder", kind, leaf]:
        name = f"{kinds[kind]}1.{leaf}"
      case ["encoder", "stages", stage, "layers", block, "shortcut", kind, leaf]:
        name = f"layer{int(stage) + 1}.{block}.downsample.{numbers[kind]}.{leaf}"
      case ["encoder", "stages", stage, "layers", block, "layer", i, kind, leaf]:
        name = f"layer{int(stage) + 1}.{block}.{kinds[kind]}{int(i) + 1}.{leaf}"
    renamed[name] = value
  return {**renamed, "fc.weight": np.zeros((5, 32), np.float32), "fc.bias": np.zeros(5, np.float32)}


def test_torchvision_names(load, resnet):
  _, expected = load("image", resnet)
  chex.assert_trees_all_equal(load("image", rewrite(resnet, torchvision_names))[1], expected)


@with_torch
@pytest.mark.parametrize("name", ["resnet_v15", "resnet_basic"])
def test_torchvision_file(load, tmp_path, name):
  import torch

  expected_config, expected = load("image", REFERENCES / name)
  tensors = torchvision_names(load_file(REFERENCES / name / "model.safetensors"))
  tensors = {name: torch.tensor(value) for name, value in tensors.items()}
  torch.save(tensors, tmp_path / "resnet-0676ba61.pth")
  for path in (tmp_path, tmp_path / "resnet-0676ba61.pth"):
    config, variables = load("image", path)
    chex.assert_trees_all_equal(variables, expected)
    for field in ("depths", "widths", "block", "stem_width", "downsample_in_bottleneck"):
      assert config.image[field] == expected_config.image[field]
    assert config.image.mean == (0.485, 0.456, 0.406)


@with_torch
def test_torch_file(load, bert):
  import torch

  _, expected = load("text", bert)
  tensors = load_file(bert / "model.safetensors")
  (bert / "model.safetensors").unlink()
  file = bert / "pytorch_model.bin"
  torch.save({name: torch.tensor(value) for name, value in tensors.items()}, file)
  chex.assert_trees_all_equal(load("text", bert)[1], expected)

  file.write_bytes(file.read_bytes()[:5000])
  with pytest.raises(ValueError, match="pytorch_model.bin is not a readable dictionary of tensors"):
    load("text", bert)
  torch.save({"path": pathlib.Path("/")}, file)  # an object that only an unsafe load would create
  with pytest.raises(ValueError, match="is not a readable dictionary of tensors"):
    load("text", bert)


def test_torch_files_without_torch(bert, monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
  (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
  with pytest.raises(ValueError, match=r"needs PyTorch \(pip install torch\)"):
    weight_files.read(bert)
