"""Pretrained towers: architecture, normalisation and weights from a directory or Hugging Face id.

The directory holds config.json (for BERT's original release bert_config.json; a torchvision .pth
needs none), preprocessor_config.json beside image towers, and weights in any format that
weight_files reads.
"""

import json
import re

from ml_collections import ConfigDict

from xe_retrieval.towers import hugging_face, weight_files

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def configure(config):
  """A copy of config in which each pretrained tower's architecture is that of its checkpoint."""
  config = ConfigDict(config).copy_and_resolve_references()
  with config.unlocked():
    if config.text.pretrained:
      config.text.update(bert_fields(locate(config.text)))
    if config.image.pretrained:
      config.image.update(_resnet_fields(locate(config.image)))
  if config.text.pretrained and config.text.tokens > config.text.positions:
    raise ValueError(
      f"config.text.tokens={config.text.tokens}, but {config.text.pretrained} knows "
      f"{config.text.positions} positions"
    )
  return config


def locate(tower):
  """config.text or config.image -> the local directory of its pretrained weights."""
  return weight_files.locate(tower.pretrained, tower.get("revision", ""))


def load(config, variables):
  """Variables of the dual encoder with the weights of each pretrained tower put in.

  Of `variables` only shapes, dtypes and shardings of the towers matter; projections stay as given.
  """
  variables = {collection: dict(encoders) for collection, encoders in variables.items()}
  for encoder in ("text", "image"):
    source = config[encoder].pretrained
    if not source:
      continue
    collections = [name for name in ("params", "batch_stats") if encoder in variables.get(name, {})]
    tower = {name: variables[name][encoder]["tower"] for name in collections}
    tensors = weight_files.read(locate(config[encoder]))
    tower = hugging_face.from_tensors(tensors, tower, source)
    for name in collections:
      variables[name][encoder] = {**variables[name][encoder], "tower": tower[name]}
  return variables


def bert_fields(path):
  from transformers import BertConfig

  file = path / "config.json"
  if not file.exists() and (path / "bert_config.json").exists():
    file = path / "bert_config.json"
  bert = _read_config(file, BertConfig)
  _require(file, "hidden_act", bert.hidden_act, "gelu")
  _require(file, "pad_token_id", bert.pad_token_id, 0)
  _require(
    file,
    "position_embedding_type",
    getattr(bert, "position_embedding_type", "absolute"),
    "absolute",
  )
  return {
    "vocab_size": bert.vocab_size,
    "layers": bert.num_hidden_layers,
    "width": bert.hidden_size,
    "heads": bert.num_attention_heads,
    "mlp": bert.intermediate_size,
    "positions": bert.max_position_embeddings,
    "token_types": bert.type_vocab_size,
    "norm_eps": bert.layer_norm_eps,
  }


def _resnet_fields(path):
  from transformers import ResNetConfig

  file = path / "config.json"
  torchvision = path if path.is_file() else next(path.glob("*.pth"), None)
  if torchvision and not file.exists():
    return {**_torchvision_fields(weight_files.read(path), torchvision), **IMAGENET}
  resnet = _read_config(file, ResNetConfig)
  _require(file, "hidden_act", resnet.hidden_act, "relu")
  _require(file, "num_channels", resnet.num_channels, 3)
  _require(file, "downsample_in_first_stage", resnet.downsample_in_first_stage, False)
  return {
    "depths": tuple(resnet.depths),
    "widths": tuple(resnet.hidden_sizes),
    "block": resnet.layer_type,
    "stem": "imagenet",
    "stem_width": resnet.embedding_size,
    "downsample_in_bottleneck": resnet.downsample_in_bottleneck,
    **_normalisation(path / "preprocessor_config.json"),
  }


def _torchvision_fields(tensors, path):
  """The architecture, from names and shapes alone; torchvision's ResNets are always v1.5."""
  blocks = [
    re.match(r"encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.conv", n) for n in tensors
  ]
  blocks = {tuple(map(int, match.groups())) for match in blocks if match}
  if not blocks or "embedder.embedder.convolution.weight" not in tensors:
    raise ValueError(f"{path} is not a torchvision ResNet, and there is no config.json beside it")
  stages = range(1 + max(stage for stage, _, _ in blocks))
  last = max(conv for _, _, conv in blocks)
  name = "encoder.stages.{}.layers.0.layer.{}.convolution.weight"
  return {
    "depths": tuple(1 + max(i for stage, i, _ in blocks if stage == s) for s in stages),
    "widths": tuple(tensors[name.format(stage, last)].shape[0] for stage in stages),
    "block": "bottleneck" if last == 2 else "basic",
    "stem": "imagenet",
    "stem_width": tensors["embedder.embedder.convolution.weight"].shape[0],
    "downsample_in_bottleneck": False,
  }


def _normalisation(file):
  """Mean and standard deviation for pixels in 0..1; {} without the file, to keep the config's."""
  if not file.exists():
    return {}
  fields = _read_json(file)
  # Theirs: (pixel * factor - mean) / std with pixel in 0..255.
  factor = 255 * (fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1)
  normalise = fields.get("do_normalize", True)
  mean = fields.get("image_mean", IMAGENET["mean"]) if normalise else (0.0, 0.0, 0.0)
  std = fields.get("image_std", IMAGENET["std"]) if normalise else (1.0, 1.0, 1.0)
  return {"mean": tuple(m / factor for m in mean), "std": tuple(s / factor for s in std)}


def _read_config(file, kind):
  if not file.exists():
    raise ValueError(
      f"{file.parent} holds no {file.name}: it is not a pretrained {kind.model_type}"
    )
  fields = _read_json(file)
  _require(file, "model_type", fields.get("model_type", kind.model_type), kind.model_type)
  return kind.from_dict(fields)


def _read_json(file):
  try:
    return json.loads(file.read_text())
  except ValueError as error:
    raise ValueError(f"{file} is not readable as JSON ({error}): fetch it again") from error


def _require(file, field, value, expected):
  if value != expected:
    raise ValueError(f"{file}: {field} is {value!r}; this tower can only be {expected!r}")
