"""An exported model: a directory that other programs can use, and that reads back as a model.

text/, image/            Hugging Face directories, for transformers' AutoModel
projections.safetensors  the two matrices into the common space, "text.weight", "image.weight";
                         with a trunk before them, also "text.trunk_norm.weight" and so on
text.jax, image.jax      jax.export functions, weights inside: int32 [B, T] or uint8 [B, H, W, 3]
                         -> float32 [B, D] of unit norm; need jax alone, for any batch size B
config.json, README.md   the training config, and how to use each part
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from xe_retrieval import config as config_lib
from xe_retrieval.data import tokenization
from xe_retrieval.towers import dual_encoder, families, weight_files
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
  for name in ("text", "image"):
    (part / name).mkdir(parents=True)
    tower = {kind: tree[name]["tower"] for kind, tree in variables.items() if name in tree}
    family = families.of(config, name)
    tensors = {family.prefix + key: value for key, value in family.to_tensors(tower).items()}
    metadata = {"format": "pt"}  # transformers refuses files without it
    save_file(tensors, part / name / "model.safetensors", metadata)
    if theirs := family.export(getattr(model, name).tower):
      theirs.save_pretrained(part / name)
  encoder.tokenizer.save(part / "text")
  tokenizer = part / "text" / "tokenizer_config.json"
  fields = json.loads(tokenizer.read_text()) | {"model_max_length": config.text.tokens}
  _write_json(tokenizer, fields)
  _write_json(part / "image" / "preprocessor_config.json", _preprocessor(config.image))

  save_file(_projections(variables["params"]), part / PROJECTIONS)
  for name, function in _functions(config, model, variables).items():
    (part / f"{name}.jax").write_bytes(function.serialize())
  (part / "config.json").write_text(config_lib.to_json(config))
  (part / "README.md").write_text(_readme(config, encoder.step))
  if out.exists():
    out.rmdir()
  part.rename(out)


def read(path):
  """An exported directory -> config, model, variables, tokenizer."""
  config = config_lib.from_json((path / "config.json").read_text())
  model = dual_encoder.from_config(config)
  variables = jax.eval_shape(lambda: dual_encoder.init(config, model))
  for name in ("text", "image"):
    tower = {kind: tree[name]["tower"] for kind, tree in variables.items() if name in tree}
    tensors = weight_files.read(path / name)
    tower = families.of(config, name).from_tensors(tensors, tower, path / name)
    for kind in tower:
      variables[kind][name]["tower"] = tower[kind]
    variables["params"][name]["projection"] = _read_projection(
      path / PROJECTIONS, name, variables["params"][name]["projection"]
    )
  return config, model, variables, tokenization.load(path / "text", config.text)


def _projections(params):  # {"text": {"projection": …}, …} -> {tensor name: array}
  """As torch.nn.Linear and torch.nn.LayerNorm hold them: kernels [out, in]."""
  return {
    _tensor_name(name, path): np.ascontiguousarray(value.T)  # .T leaves vectors alone
    for name in ("text", "image")
    for path, value in traverse_util.flatten_dict(params[name]["projection"]).items()
  }


def _read_projection(file, name, like):
  """A tree like `like`, its values from the file."""
  tensors = weight_files.read_safetensors(file)
  out = {}
  for path, leaf in traverse_util.flatten_dict(like).items():
    tensor = _tensor_name(name, path)
    shape = tensors[tensor].T.shape if tensor in tensors else None
    if shape != leaf.shape:
      raise ValueError(f"{file}: {tensor} should be {leaf.shape[::-1]}, is {shape and shape[::-1]}")
    out[path] = jnp.asarray(tensors[tensor].T)
  return traverse_util.unflatten_dict(out)


def _tensor_name(name, path):  # "text", ("trunk_in", "kernel") -> "text.trunk_in.weight"
  return ".".join([name, *path[:-1], LEAVES[path[-1]]])


def _preprocessor(image):
  """Resizes and crops as our evaluation does, up to rounding in the interpolation."""
  return {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": image.size},
    "resample": 2,  # bilinear
    "do_center_crop": True,
    "crop_size": {"height": image.size, "width": image.size},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(image.mean),
    "image_std": list(image.std),
  }


def _functions(config, model, variables):
  """Each tower as a function that jax runs without this package; embeddings have unit norm."""

  def embedding(method):
    def function(x):
      x = model.apply(variables, x, method=method)
      return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

    return jax.export.export(jax.jit(function), platforms=PLATFORMS)

  (batch,) = jax.export.symbolic_shape("batch")
  tokens = jax.ShapeDtypeStruct((batch, config.text.tokens), jnp.int32)
  pixels = jax.ShapeDtypeStruct((batch, config.image.size, config.image.size, 3), jnp.uint8)
  return {"text": embedding("embed_text")(tokens), "image": embedding("embed_image")(pixels)}


def _readme(config, at):
  size = config.image.size
  pooled = "[:, 0]" if config.text.pooling == "cls" else "mean over attention_mask"
  head = "x @ weight.T of projections.safetensors"
  if config.text.get("trunk", 0) or config.image.get("trunk", 0):
    head = "x + trunk_out(gelu(trunk_in(trunk_norm(x)))) (gelu by tanh, norm with 1e-6), " + head
  if config.image.stem == "imagenet":
    resnet = 'ResNetModel.from_pretrained("image")(pixel_values).pooler_output.flatten(1)'
  else:
    resnet = f"# (transformers' ResNetModel knows no {config.image.stem!r} stem: use image.jax)"
  return f"""\
# Image-text retrieval model

Trained with {config.loss} on {config.data.name}, {at} steps. The score of a caption and an image is
the cosine of their embeddings; a threshold on it means the same for every query.

```python
import xe_retrieval  # everything, preprocessing included
model = xe_retrieval.load("this directory")
model.embed_text(["two dogs on a beach"]) @ model.embed_images(["a.jpg"]).T

import jax  # jax alone: int32 [B, {config.text.tokens}] or uint8 [B, {size}, {size}, 3] in
embed_text = jax.export.deserialize(open("text.jax", "rb").read()).call

# PyTorch: tokenizer(captions, padding=True, truncation=True); then {head}, then unit norm
from transformers import BertModel, ResNetModel
bert = BertModel.from_pretrained("text", add_pooling_layer=False)
bert(**tokens).last_hidden_state  # then {pooled}
{resnet}
```
"""


def _write_json(path, value):
  path.write_text(json.dumps(value, indent=2) + "\n")
