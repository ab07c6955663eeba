"""What a family of towers is: a table of tensor names, and the fields that make its architecture.

NAMES maps Hugging Face modules to ours, "#" being a number: {"encoder.layer.#.output.dense":
"layer_#/mlp_out"}. Weights and biases follow the module; a single tensor is named with its leaf. A
value may be (ours, transform) where the layout is neither equal nor that of its kind of layer.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import numpy as np
from flax import traverse_util

LEAVES = {
  "kernel": "weight",
  "scale": "weight",
  "embedding": "weight",
  "bias": "bias",
  "mean": "running_mean",
  "var": "running_var",
}


@dataclasses.dataclass(frozen=True)
class Transform:
  """Between layouts of one tensor."""

  to_ours: Callable[[np.ndarray], np.ndarray]
  to_theirs: Callable[[np.ndarray], np.ndarray]


SAME = Transform(lambda x: x, lambda x: x)
DENSE = Transform(lambda x: x.T, lambda x: x.T)
CONVOLUTION = Transform(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
ROWS = Transform(lambda x: x[0], lambda x: x[None])  # [1, n, width] <-> [n, width]
ROW = Transform(lambda x: x[0, 0], lambda x: x[None, None])  # [1, 1, width] <-> [width]


@dataclasses.dataclass(frozen=True)
class Family:
  name: str  # config.text.family or config.image.family
  model_types: tuple[str, ...]  # of config.json
  names: dict
  reads: tuple[str, ...]  # fields of config.text or config.image that the tower depends on
  # config.json as a transformers config -> these fields, and others that the tower prescribes
  fields: Callable[[object, str], dict]
  tower: Callable  # fields, frozen, dtype, remat -> module
  export: Callable  # fields, tower -> transformers config
  part: str = ""  # config.json's section of this tower in a dual encoder: text_config
  prefix: str = ""  # of its tensors in a dual encoder: text_model.
  aliases: tuple = ()  # (regex, replacement) that turn other names in use into those of `names`
  dropped: str = r"(?!)"  # regex of tensors that no tower has: heads, counters, optimiser state

  def canonical(self, tensors):
    """{name in a file: tensor} -> {name as in `names`: tensor}."""
    out = {}
    for name, value in tensors.items():
      name = name.removeprefix(self.prefix)
      for pattern, replacement in self.aliases:
        name = re.sub(pattern, replacement, name)
      out[name] = value
    return out

  def from_tensors(self, tensors, variables, source):
    """The variables of a tower ({"params": …, "batch_stats": …}) with the values of `tensors`."""
    tensors = self.canonical(tensors)
    ours = traverse_util.flatten_dict(variables, sep="/")
    names = {path: self.tensor(path)[0] for path in ours}
    missing = sorted(set(names.values()) - set(tensors))
    extra = set(tensors) - set(names.values())
    extra = sorted(n for n in extra if not re.fullmatch(self.dropped, n))
    if missing or extra:
      parts = [f"lacks {_list(missing)}"] * bool(missing)
      parts += [f"has no use for {_list(extra)}"] * bool(extra)
      raise ValueError(f"{source} does not fit its config: the tower {' and '.join(parts)}")
    values = {path: self._value(path, leaf, tensors, source) for path, leaf in ours.items()}
    return traverse_util.unflatten_dict(values, sep="/")

  def to_tensors(self, variables):
    """The variables of a tower as transformers' model of this family expects them."""
    tensors = {}
    for path, value in traverse_util.flatten_dict(variables, sep="/").items():
      name, transform = self.tensor(path, np.ndim(value))
      tensors[name] = np.ascontiguousarray(transform.to_theirs(np.asarray(value)))
      if name.endswith(".running_mean"):
        counter = name.replace("running_mean", "num_batches_tracked")
        tensors[counter] = np.zeros((), np.int64)
    return tensors

  def tensor(self, path, ndim=2):
    """params/layer_0/query/kernel -> (encoder.layer.0.attention.self.query.weight, transform)."""
    path = path.split("/", 1)[1]
    module, _, leaf = path.rpartition("/")
    usual = SAME if leaf != "kernel" else CONVOLUTION if ndim == 4 else DENSE
    for theirs, ours in self.names.items():
      ours, transform = ours if isinstance(ours, tuple) else (ours, usual)
      for whole, end in ((path, ""), (module, f".{LEAVES.get(leaf)}")):
        if match := re.fullmatch(re.escape(ours).replace(r"\#", r"(\d+)"), whole):
          for number in match.groups():
            theirs = theirs.replace("#", number, 1)
          return theirs + end, transform
    raise KeyError(f"no Hugging Face name for {path}")

  def _value(self, path, leaf, tensors, source):
    name, transform = self.tensor(path, leaf.ndim)
    theirs = tensors[name]
    expected = transform.to_theirs(np.broadcast_to(0, leaf.shape)).shape
    if theirs.shape != expected:
      raise ValueError(f"{source}: {name} has shape {theirs.shape}, expected {expected}")
    value = transform.to_ours(theirs).astype(leaf.dtype)
    if not np.isfinite(value).all():
      raise ValueError(f"{source}: {name} holds NaN or infinity; the file is damaged")
    return jax.device_put(value, getattr(leaf, "sharding", None))


def transformers_config(tower, kind, **more):
  """transformers' config of a Transformer, with the fields that most kinds have and `more`."""
  import transformers

  return getattr(transformers, f"{kind}Config")(
    architectures=[f"{kind}Model"],
    num_hidden_layers=tower.layers,
    hidden_size=tower.width,
    num_attention_heads=tower.heads,
    layer_norm_eps=tower.norm_eps,
    hidden_act=tower.activation,
    **({"intermediate_size": tower.mlp} | more),
  )


def require(file, field, value, *allowed):
  if value not in allowed:
    which = repr(allowed[0]) if len(allowed) == 1 else f"one of {', '.join(map(repr, allowed))}"
    raise ValueError(f"{file}: {field} is {value!r}; this tower can only be {which}")
  return value


def _list(names, most=20):
  more = f" … and {len(names) - most} more" if len(names) > most else ""
  return ", ".join(names[:most]) + more
