"""An exported model: a directory that other programs can use, and that reads back as a model.

text/, image/            Hugging Face directories of the towers, for transformers' own classes; of
                         several towers side by side text/towers_0/, text/towers_1/, …
dual/                    only of a CLIP (and of a SigLIP whose projections were not trained): the
                         whole model as one, for CLIPModel or SiglipModel
projections.safetensors  the two matrices into the common space, "text.weight", "image.weight";
                         with a trunk before them, also "text.trunk_norm.weight" and so on; of
                         several towers "image.standard.mean" and ".std" of their features
text.jax, image.jax      jax.export functions, weights inside: int32 [B, T] or uint8 [B, H, W, 3]
                         -> float32 [B, D] of unit norm; need jax alone, for any batch size B. The
                         ids of several text towers lie one after the other
config.json, README.md   the training config, and how to use each part
"""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from PIL import Image
from safetensors.numpy import save_file

from xe_retrieval import config as config_lib
from xe_retrieval.data import decoding, tokenization
from xe_retrieval.towers import dual_encoder, families, weight_files
from xe_retrieval.towers.families import side_by_side
from xe_retrieval.towers.families.family import LEAVES

PROJECTIONS = "projections.safetensors"
PLATFORMS = ("cpu", "cuda", "tpu")


def is_exported(path) -> bool:
  return (path / PROJECTIONS).exists()


def write(encoder, out) -> None:
  """Writes the model of a model.Encoder to a new directory, atomically by renaming OUT.part."""
  if out.exists() and any(out.iterdir()):
    raise ValueError(f"{out} is not empty; choose a new directory")
  config, variables = encoder.config, jax.device_get(encoder.variables)
  model = dual_encoder.from_config(config)
  part = out.with_name(out.name + ".part")
  shutil.rmtree(part, ignore_errors=True)
  metadata = {"format": "pt"}  # transformers refuses files without it
  for name, alone, place in side_by_side.towers(config):
    directory = part.joinpath(name, *place)
    directory.mkdir(parents=True)
    tower, family = side_by_side.take(variables, name, place), families.of(alone, name)
    tensors = {family.prefix + key: value for key, value in family.to_tensors(tower).items()}
    save_file(tensors, directory / "model.safetensors", metadata)
    if theirs := family.export(getattr(dual_encoder.from_config(alone), name).tower):
      theirs.save_pretrained(directory)
    if name == "image":
      _write_json(directory / "preprocessor_config.json", _preprocessor(alone.image))
  _write_tokenizer(encoder, part / "text")
  if whole := _dual(config, model, variables, encoder.learned):
    (part / "dual").mkdir()
    theirs, tensors = whole
    save_file(tensors, part / "dual" / "model.safetensors", metadata)
    theirs.save_pretrained(part / "dual")
    _write_tokenizer(encoder, part / "dual")
    _write_json(part / "dual" / "preprocessor_config.json", _preprocessor(config.image))

  save_file(_projections(variables), part / PROJECTIONS)
  (batch,) = jax.export.symbolic_shape("batch")
  for name, (function, shape, dtype) in functions(config, model, variables).items():
    exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)
    like = jax.ShapeDtypeStruct((batch, *shape), dtype)
    (part / f"{name}.jax").write_bytes(exported(like).serialize())
  (part / "config.json").write_text(config_lib.to_json(config))
  (part / "README.md").write_text(_readme(config, encoder.step))
  if out.exists():
    out.rmdir()
  part.rename(out)


def _write_tokenizer(encoder, directory):
  encoder.tokenizer.save(directory)
  for name, text in config_lib.towers(encoder.config.text).items():
    tokenizer = directory / name / "tokenizer_config.json"
    length = {"model_max_length": text.tokens}
    _write_json(tokenizer, json.loads(tokenizer.read_text()) | length)


def _dual(config, model, variables, learned):
  """transformers' config and tensors of a whole CLIP or SigLIP; None where it would be neither."""
  import transformers

  kinds = {"clip": transformers.CLIPConfig, "siglip": transformers.SiglipConfig}
  kind = families.of(config, "text").name
  params = variables["params"]
  heads = {name: params[name]["projection"] for name in ("text", "image")}
  if kind not in kinds or families.of(config, "image").name != kind:
    return None
  if any(side_by_side.several(config, name) for name in heads):
    return None
  if any(set(head) != {"kernel"} for head in heads.values()):  # a trunk
    return None
  scale = np.array(learned.get("log_scale", math.log(config.scale)), np.float32)
  if kind == "clip":
    tensors = {
      "logit_scale": scale,
      "text_projection.weight": np.ascontiguousarray(heads["text"]["kernel"].T),
      "visual_projection.weight": np.ascontiguousarray(heads["image"]["kernel"].T),
    }
    more = {"projection_dim": config.embedding_dim}
  else:  # its towers end in the common space
    eye = np.eye(config.embedding_dim)
    if not all(np.array_equal(head["kernel"], eye) for head in heads.values()):
      return None
    bias = np.array([learned.get("bias", config.get("logit_bias", 0.0))], np.float32)
    tensors, more = {"logit_scale": scale[None], "logit_bias": bias}, {}
  for name in ("text", "image"):
    family = families.of(config, name)
    more[family.part] = family.export(getattr(model, name).tower).to_dict()
    found = family.to_tensors({"params": params[name]["tower"]})
    tensors |= {family.prefix + key: value for key, value in found.items()}
  return kinds[kind](
    architectures=[kinds[kind].__name__.replace("Config", "Model")], **more
  ), tensors


def read(path):
  """An exported directory -> config, model, variables, tokenizer."""
  config = config_lib.from_json((path / "config.json").read_text())
  model = dual_encoder.from_config(config)
  variables = jax.eval_shape(lambda: dual_encoder.init(config, model))
  for name, alone, place in side_by_side.towers(config):
    directory = path.joinpath(name, *place)
    tower = side_by_side.take(variables, name, place)
    tower = families.of(alone, name).from_tensors(weight_files.read(directory), tower, directory)
    side_by_side.put(variables, name, place, tower)
  for collection, name, part in _HEADS:
    if part in variables.get(collection, {}).get(name, {}):
      like = variables[collection][name][part]
      variables[collection][name][part] = _read_head(path / PROJECTIONS, name, part, like)
  return config, model, variables, tokenization.load(path / "text", config.text)


# What lies between a tower's features and the common space.
_HEADS = (
  ("params", "text", "projection"),
  ("params", "image", "projection"),
  ("batch_stats", "text", "standard"),
  ("batch_stats", "image", "standard"),
)


def _projections(variables):  # -> {tensor name: array}
  """As torch.nn.Linear and torch.nn.LayerNorm hold them: kernels [out, in]."""
  return {
    _tensor_name(name, part, path): np.ascontiguousarray(value.T)  # .T leaves vectors alone
    for collection, name, part in _HEADS
    for path, value in traverse_util.flatten_dict(
      variables.get(collection, {}).get(name, {}).get(part, {})
    ).items()
  }


def _read_head(file, name, part, like):
  """A tree like `like`, its values from the file."""
  tensors = weight_files.read_safetensors(file)
  out = {}
  for path, leaf in traverse_util.flatten_dict(like).items():
    tensor = _tensor_name(name, part, path)
    shape = tensors[tensor].T.shape if tensor in tensors else None
    if shape != leaf.shape:
      raise ValueError(f"{file}: {tensor} should be {leaf.shape[::-1]}, is {shape and shape[::-1]}")
    out[path] = jnp.asarray(tensors[tensor].T)
  return traverse_util.unflatten_dict(out)


def _tensor_name(name, part, path):
  """text, projection, (trunk_in, kernel) -> text.trunk_in.weight; text.standard.mean."""
  if part == "standard":
    return ".".join([name, part, *path])
  return ".".join([name, *path[:-1], LEAVES[path[-1]]])


def _preprocessor(image):
  """What evaluation does; of a `crop` up to rounding in the interpolation."""
  view = decoding.View.of(image)
  square = {"height": view.size, "width": view.size}
  squash = view.resize == "squash"
  return {
    "image_processor_type": "ViTImageProcessor" if squash else "CLIPImageProcessor",
    "do_resize": True,
    "size": square if squash else {"shortest_edge": view.shortest or view.size},
    "resample": int(Image.Resampling[(view.resample or "bilinear").upper()]),
    "do_center_crop": not squash,
    "crop_size": square,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(image.mean),
    "image_std": list(image.std),
  }


def functions(config, model, variables) -> dict:
  """{"text": (function, shape of its input without the batch, dtype), "image": …}.

  Each needs nothing of this package once it is converted; embeddings have unit norm.
  """

  def embedding(method):
    def function(x):
      x = model.apply(variables, x, method=method)
      return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

    return function

  pixels = decoding.View.of(config.image).shape
  return {
    "text": (embedding("embed_text"), (_tokens(config),), jnp.int32),
    "image": (embedding("embed_image"), pixels, jnp.uint8),
  }


def _tokens(config):
  return tokenization.spans(config.text)[-1][1]


def _readme(config, at):
  height, width, _ = decoding.View.of(config.image).shape
  head = "x @ weight.T of projections.safetensors"
  if config.text.get("trunk", 0) or config.image.get("trunk", 0):
    head = "x + trunk_out(gelu(trunk_in(trunk_norm(x)))) (gelu by tanh, norm with 1e-6), " + head
  several = [name for name in ("text", "image") if side_by_side.several(config, name)]
  if several:
    what = f"{' and '.join(several)}: features one after the other, less standard.mean, over"
    head = f"{what} standard.std; {head}"
  lines = []
  for name, alone, place in side_by_side.towers(config):
    tower, directory = (
      getattr(dual_encoder.from_config(alone), name).tower,
      "/".join([name, *place]),
    )
    if theirs := families.of(alone, name).export(tower):
      pooled = getattr(tower, "pooling", "mean over positions")
      pooled += (
        f" of layers {', '.join(map(str, c))}" if (c := getattr(tower, "chosen", ())) else ""
      )
      kind = theirs.architectures[0]
      lines.append(f'transformers.{kind}.from_pretrained("{directory}")  # {pooled}')
    else:
      lines.append("# (transformers' ResNetModel knows no 'patch' stem: use image.jax)")
  lines = "\n".join(lines)
  return f"""\
# Image-text retrieval model

Trained with {config.loss} on {config.data.name}, {at} steps. The score of a caption and an image is
the cosine of their embeddings; a threshold on it means the same for every query.

```python
import xe_retrieval  # everything, preprocessing included
model = xe_retrieval.load("this directory")
model.embed_text(["two dogs on a beach"]) @ model.embed_images(["a.jpg"]).T

import jax  # jax alone: int32 [B, {_tokens(config)}] or uint8 [B, {height}, {width}, 3] in
embed_text = jax.export.deserialize(open("text.jax", "rb").read()).call

# PyTorch: tokenizer(captions, padding=True, truncation=True); then {head}, then unit norm
import transformers
{lines}
```
"""


def _write_json(path, value):
  path.write_text(json.dumps(value, indent=2) + "\n")
