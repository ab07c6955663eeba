"""Pretrained towers: architecture, preprocessing and weights from a directory or Hugging Face id.

The directory holds config.json (for BERT's original release bert_config.json; a torchvision .pth
needs none), preprocessor_config.json beside image towers, and weights in any format that
weight_files reads. config.pretrained names a whole dual encoder (CLIP, SigLIP): both towers and
what maps their features into the common space.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from xe_retrieval import config as config_lib
from xe_retrieval.data import tokenization
from xe_retrieval.towers import dual_encoder, families, weight_files
from xe_retrieval.towers.families import resnet, side_by_side

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
RESAMPLE = {
  0: "nearest",
  1: "lanczos",
  2: "bilinear",
  3: "bicubic",
  4: "box",
  5: "hamming",
}  # PIL's
DUAL = ("clip", "siglip")  # model_type of config.json


def configure(config):
  """A copy of config in which each pretrained tower's architecture is that of its checkpoint."""
  config = ConfigDict(config).copy_and_resolve_references()
  with config.unlocked():
    if config.get("pretrained", ""):
      config.text.pretrained = config.image.pretrained = config.pretrained
      config.update(_dual_fields(locate(config.text), config.scale))
    for encoder, fields in FIELDS.items():
      if found := side_by_side.sources(config[encoder].pretrained):
        config[encoder].towers = _several(config, encoder, found)
      elif config[encoder].pretrained:
        config[encoder].update(fields(locate(config[encoder])))
    if not config.text.tokens and not side_by_side.several(config, "text"):
      config.text.tokens = _room(config)
  check(config)
  return config


def check(config) -> None:
  """ValueError if fields that the towers do not bring do not fit them."""
  augmented = config.get("data", {}).get("augment", "none") != "none"
  if augmented and side_by_side.several(config, "image"):
    raise ValueError(
      "several image towers side by side need config.data.augment='none': their features are cached"
    )
  for alone, _ in side_by_side.each(config, "text"):
    if (text := alone.text).pretrained and text.tokens > (room := _room(alone)):
      raise ValueError(
        f"config.text.tokens={text.tokens}, but {text.pretrained} knows {room} positions"
      )


def _room(config):
  """How many tokens the pretrained text tower can take."""
  return families.of(config, "text").tower(config.text, 0, jnp.float32, False).embeddings.room


def locate(tower):
  """config.text or config.image -> the local directory of its pretrained weights."""
  return weight_files.locate(tower.pretrained, tower.get("revision", ""))


def load(config, variables):
  """Variables of the dual encoder with the weights of each pretrained tower put in.

  Of `variables` only shapes, dtypes and shardings of the towers matter; projections stay as given,
  except with config.pretrained.
  """
  variables = jax.tree.map(lambda x: x, variables)  # nested dicts of its own
  for encoder, alone, place in side_by_side.towers(config):
    source = alone[encoder].pretrained
    if not source:
      continue
    tensors = weight_files.read(locate(alone[encoder]))
    tower = side_by_side.take(variables, encoder, place)
    tower = families.of(alone, encoder).from_tensors(tensors, tower, source)
    side_by_side.put(variables, encoder, place, tower)
    if config.get("pretrained", ""):
      projection = variables["params"][encoder]["projection"]
      kernel = _projection(encoder, tensors, projection["kernel"], source)
      variables["params"][encoder]["projection"] = {**projection, "kernel": kernel}
  return variables


def stock_config(source, dataset="", data_dir=""):
  """The config of a Hugging Face CLIP or SigLIP as it is: trained for no steps, all frozen."""
  encoder = {"pretrained": "", "freeze": "all", "dropout": 0.0, "feature_dropout": 0.0}
  config = ConfigDict(
    {
      "pretrained": str(source),
      "steps": 0,
      "seed": 0,
      "loss": "none",
      "scale": 0.0,
      "dtype": "float32",
      "remat": False,
      "embedding_dim": 0,
      "calibration_split": "validation",
      "data": {"name": dataset, "dir": data_dir, "augment": "none"},
      "text": {**encoder, "pooling": "", "tokens": 0},
      "image": {**encoder, "size": 0, "mean": (), "std": ()},
    }
  )
  config = configure(config)
  if not config.image.size:
    raise ValueError(f"{source} holds no preprocessor_config.json, which says how to see images")
  return config


def stock(config):
  """`stock_config` -> model, variables, tokenizer."""
  model = dual_encoder.from_config(config)
  variables = load(config, jax.eval_shape(lambda: dual_encoder.init(config, model)))
  return model, variables, tokenizer(config)


def tokenizer(config):
  """That of config.text.pretrained."""
  each = [alone.text for alone, _ in side_by_side.each(config, "text")]
  found = [tokenization.of_tower(locate(text), text) for text in each]
  return tokenization.SideBySide(found) if side_by_side.several(config, "text") else found[0]


def is_dual(path) -> bool:
  """Whether a directory is a Hugging Face CLIP or SigLIP."""
  file = path / "config.json"
  return file.exists() and _read_json(file).get("model_type") in DUAL


def text_fields(path):
  """The fields of config.text for a checkpoint."""
  file = path / "config.json"
  if not file.exists() and (path / "bert_config.json").exists():
    file = path / "bert_config.json"
  return _fields("text", file)


def image_fields(path):
  """The fields of config.image for a checkpoint."""
  file = path / "config.json"
  torchvision = path if path.is_file() else next(path.glob("*.pth"), None)
  if torchvision and not file.exists():
    found = resnet.torchvision_fields(weight_files.read(path), torchvision)
    return {"family": "resnet", **found, **IMAGENET}
  found = _fields("image", file)
  preprocessor = path / "preprocessor_config.json"
  if not preprocessor.exists():
    preprocessor = path / "processor_config.json"  # by transformers 5, for text and images
    theirs = _read_json(preprocessor).get("image_processor", {}) if preprocessor.exists() else {}
  else:
    theirs = _read_json(preprocessor)
  if not theirs:
    return found
  found |= _normalisation(theirs)
  # ResNets stay with the crop that they have always had here.
  return found if found["family"] == "resnet" else found | _resizing(theirs, preprocessor)


FIELDS = {"text": text_fields, "image": image_fields}


def _several(config, encoder, sources):
  """config.text.towers or config.image.towers: {name: fields of a tower}, as in `sources`."""
  given, count = (
    config[encoder],
    f"each of the {len(sources)} towers of config.{encoder}.pretrained",
  )
  revisions = (given.get("revision", "") or "," * (len(sources) - 1)).split(",")
  if len(revisions) != len(sources):
    raise ValueError(
      f"config.{encoder}.revision={given.revision!r}: expected one for {count}, such as 'v1,v2'"
    )
  found = [
    FIELDS[encoder](weight_files.locate(source, revision))
    | {"pretrained": source, "revision": revision}
    for source, revision in zip(sources, revisions, strict=True)
  ]
  if encoder == "image":
    usual = {name: given[name] for name in ("size", "mean", "std")}
    layers = given.get("layers", ()) or ((),) * len(sources)
    if len(layers) != len(sources) or not all(isinstance(one, tuple) for one in layers):
      raise ValueError(
        f"config.image.layers={layers}: expected a tuple for {count}, such as ((), (9, 10))"
      )
    found = [usual | one | {"layers": own} for one, own in zip(found, layers, strict=True)]
  return {config_lib.tower_name(i): one for i, one in enumerate(found)}


def _fields(encoder, file):
  import transformers

  if not file.exists():
    raise ValueError(f"{file.parent} holds no {file.name}: it is not a pretrained {encoder} tower")
  theirs = _read_json(file)
  model_type = theirs.get("model_type", families.DEFAULT[encoder])
  family = families.for_model_type(encoder, model_type, file)
  theirs = transformers.AutoConfig.for_model(model_type, **_without(theirs, "model_type"))
  if family.part and hasattr(theirs, family.part):
    theirs = getattr(theirs, family.part)
  return {"family": family.name, **family.fields(theirs, file)}


def _dual_fields(path, scale):
  """Fields of the config beside both towers': the common space and the loss's scalars.

  A scale of 0 stands for the model's own.
  """
  file = path / "config.json"
  theirs = _read_json(file)
  if theirs.get("model_type") not in DUAL:
    raise ValueError(
      f"{file}: model_type is {theirs.get('model_type')!r}; config.pretrained can be "
      f"{' or '.join(DUAL)}, other towers are config.text.pretrained and config.image.pretrained"
    )
  tensors = weight_files.read(path)
  own = min(math.exp(tensors["logit_scale"].item()), config_lib.MAX_SCALE)
  common = "text_projection.weight" if "text_projection.weight" in tensors else _HEAD
  found = {"scale": scale or own, "embedding_dim": len(tensors[common])}
  bias = tensors.get("logit_bias")
  return found if bias is None else found | {"logit_bias": float(bias.item())}


_HEAD = "text_model.head.bias"  # SigLIP has no other projection


def _projection(encoder, tensors, like, source):
  """CLIP's projection; the identity for SigLIP, whose towers end in the common space."""
  name = {"text": "text_projection.weight", "image": "visual_projection.weight"}[encoder]
  value = tensors[name].T if name in tensors else np.eye(like.shape[0])
  if value.shape != like.shape:
    raise ValueError(
      f"{source}: {name} maps {value.shape[0]} features to {value.shape[1]}, expected "
      f"{like.shape[0]} and {like.shape[1]}"
    )
  return jnp.asarray(value, like.dtype)


def _normalisation(fields):
  """Mean and standard deviation for pixels in 0..1."""
  # Theirs: (pixel * factor - mean) / std with pixel in 0..255.
  factor = 255 * (fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1)
  normalise = fields.get("do_normalize", True)
  mean = fields.get("image_mean", IMAGENET["mean"]) if normalise else (0.0, 0.0, 0.0)
  std = fields.get("image_std", IMAGENET["std"]) if normalise else (1.0, 1.0, 1.0)
  return {"mean": tuple(m / factor for m in mean), "std": tuple(s / factor for s in std)}


def _resizing(fields, file):
  """image.size, and how photos become squares of it: see decoding.View."""
  size, crop = fields.get("size", 224), fields.get("crop_size", 224)
  size = {"shortest_edge": size} if isinstance(size, int) and _crops(fields) else size
  size = size if isinstance(size, dict) else {"height": size, "width": size}
  crop = crop if isinstance(crop, dict) else {"height": crop, "width": crop}
  found = {"resample": RESAMPLE[fields.get("resample", 3 if "shortest_edge" in size else 2)]}
  if "shortest_edge" in size:
    found |= {"resize": "shortest", "shortest": size["shortest_edge"], "size": crop["height"]}
    square = _crops(fields) and crop["height"] == crop["width"]
  else:
    found |= {"resize": "squash", "size": size["height"]}
    square = size["height"] == size["width"] and not _crops(fields)
  if not fields.get("do_resize", True) or not square:
    raise ValueError(f"{file}: only square images are supported, resized and perhaps cropped")
  return found


def _crops(fields):
  default = fields.get("image_processor_type", "").startswith(("CLIP", "Bit"))
  default |= fields.get("feature_extractor_type", "").startswith("CLIP")
  return fields.get("do_center_crop", default)


def _read_json(file):
  try:
    return json.loads(file.read_text())
  except ValueError as error:
    raise ValueError(f"{file} is not readable as JSON ({error}): fetch it again") from error


def _without(fields, *names):
  return {key: value for key, value in fields.items() if key not in names}
