"""Names and layouts: the variables of a tower <-> Hugging Face tensors."""

import re

import jax
import numpy as np
from flax import traverse_util

MODULES = [  # ours, theirs
  (r"embeddings/(word|position|token_type)", r"embeddings.\1_embeddings"),
  (r"embeddings/norm", r"embeddings.LayerNorm"),
  (r"layer_(\d+)/(query|key|value)", r"encoder.layer.\1.attention.self.\2"),
  (r"layer_(\d+)/attention_out", r"encoder.layer.\1.attention.output.dense"),
  (r"layer_(\d+)/attention_norm", r"encoder.layer.\1.attention.output.LayerNorm"),
  (r"layer_(\d+)/mlp_in", r"encoder.layer.\1.intermediate.dense"),
  (r"layer_(\d+)/mlp_out", r"encoder.layer.\1.output.dense"),
  (r"layer_(\d+)/mlp_norm", r"encoder.layer.\1.output.LayerNorm"),
  (r"stem/conv", r"embedder.embedder.convolution"),
  (r"stem/norm", r"embedder.embedder.normalization"),
  (r"stage_(\d+)_block_(\d+)/conv_(\d)", r"encoder.stages.\1.layers.\2.layer.\3.convolution"),
  (r"stage_(\d+)_block_(\d+)/norm_(\d)", r"encoder.stages.\1.layers.\2.layer.\3.normalization"),
  (r"stage_(\d+)_block_(\d+)/shortcut_conv", r"encoder.stages.\1.layers.\2.shortcut.convolution"),
  (r"stage_(\d+)_block_(\d+)/shortcut_norm", r"encoder.stages.\1.layers.\2.shortcut.normalization"),
]
LEAVES = {
  "kernel": "weight",
  "scale": "weight",
  "embedding": "weight",
  "bias": "bias",
  "mean": "running_mean",
  "var": "running_var",
}
# Tensors of a checkpoint that no tower has: heads, counters, optimiser state.
DROPPED = re.compile(
  r"pooler\..*|cls\..*|classifier\..*|qa_outputs\..*|fc\..*|embeddings\.position_ids"
  r"|.*\.num_batches_tracked|.*\.adam_[mv]|global_step"
)


def from_tensors(tensors, variables, source):
  """The variables of a tower ({"params": …, "batch_stats": …}) with the values of `tensors`."""
  ours = traverse_util.flatten_dict(variables, sep="/")
  names = {path: tensor_name(path) for path in ours}
  missing = sorted(set(names.values()) - set(tensors))
  extra = sorted(n for n in set(tensors) - set(names.values()) if not DROPPED.fullmatch(n))
  if missing or extra:
    parts = [f"lacks {_list(missing)}"] * bool(missing)
    parts += [f"has no use for {_list(extra)}"] * bool(extra)
    raise ValueError(f"{source} does not fit its config: the tower {' and '.join(parts)}")

  values = {}
  for path, leaf in ours.items():
    value = _to_ours(path, tensors[names[path]])
    if value.shape != leaf.shape:
      raise ValueError(
        f"{source}: {names[path]} has shape {tensors[names[path]].shape}, "
        f"expected {_to_theirs(path, np.broadcast_to(0, leaf.shape)).shape}"
      )
    value = value.astype(leaf.dtype)
    if not np.isfinite(value).all():
      raise ValueError(f"{source}: {names[path]} holds NaN or infinity; the file is damaged")
    values[path] = jax.device_put(value, getattr(leaf, "sharding", None))
  return traverse_util.unflatten_dict(values, sep="/")


def to_tensors(variables):
  """The variables of a tower as transformers' BertModel or ResNetModel expects them."""
  tensors = {}
  for path, value in traverse_util.flatten_dict(variables, sep="/").items():
    name = tensor_name(path)
    tensors[name] = np.ascontiguousarray(_to_theirs(path, np.asarray(value)))
    if name.endswith(".running_mean"):
      counter = name.replace("running_mean", "num_batches_tracked")
      tensors[counter] = np.zeros((), np.int64)
  return tensors


def tensor_name(path):
  """params/layer_0/query/kernel -> encoder.layer.0.attention.self.query.weight."""
  module, leaf = path.split("/", 1)[1].rsplit("/", 1)
  for ours, theirs in MODULES:
    if match := re.fullmatch(ours, module):
      return f"{match.expand(theirs)}.{LEAVES[leaf]}"
  raise KeyError(f"no Hugging Face name for {path}")


def _to_ours(path, value):
  if not path.endswith("/kernel"):
    return value
  return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def _to_theirs(path, value):
  if not path.endswith("/kernel"):
    return value
  return value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T


def _list(names, most=20):
  more = f" … and {len(names) - most} more" if len(names) > most else ""
  return ", ".join(names[:most]) + more
