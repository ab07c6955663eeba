"""Checkpoint files of every supported format -> {tensor name: numpy array}."""

import json
import pathlib
import re

import safetensors

SMALL_FILES = ["config.json", "*processor_config.json", "vocab.*", "merges.txt", "*token*.json"]
SMALL_FILES += ["spiece.model", "sentencepiece.bpe.model"]


def locate(name, revision=""):
  """The local path of a checkpoint: itself, or the downloaded copy of a Hugging Face id.

  With a revision (a commit, tag or branch there), a copy that is complete is used without asking.
  """
  path = pathlib.Path(name).expanduser()
  if path.exists():
    return path
  import huggingface_hub

  at = {"revision": revision or None}
  try:
    if revision and (path := _downloaded(name, at)):
      return path
    files = [*SMALL_FILES, "model*.safetensors*"]
    path = pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=files, **at))
    if not list(path.glob("*.safetensors")):
      huggingface_hub.snapshot_download(name, allow_patterns=["pytorch_model*.bin*"], **at)
  except (OSError, ValueError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(
      f"pretrained={name!r} is neither a path on this machine nor a Hugging Face id "
      f"that could be fetched ({reason})"
    ) from error
  return path


def locate_exported(name, revision=""):
  """The downloaded copy of a model that `export` wrote; None if the Hugging Face id is no such."""
  import huggingface_hub

  at = {"revision": revision or None}
  try:
    huggingface_hub.hf_hub_download(name, "projections.safetensors", **at)
    # Serialised functions repeat the weights; they are for those who do without this package.
    return huggingface_hub.snapshot_download(name, ignore_patterns=["*.jax", "*.onnx"], **at)
  except huggingface_hub.errors.RepositoryNotFoundError as error:
    raise ValueError(f"{name} is neither a path on this machine nor a model on the Hub") from error
  except huggingface_hub.errors.RevisionNotFoundError as error:
    raise ValueError(f"{name} has no revision {revision!r}") from error
  except (huggingface_hub.errors.EntryNotFoundError, OSError):
    return None  # another kind of model, or out of reach: who reads it says so


def _downloaded(name, at):
  """The copy of an earlier download if it has weights, else None."""
  import huggingface_hub

  try:
    path = pathlib.Path(huggingface_hub.snapshot_download(name, local_files_only=True, **at))
  except huggingface_hub.errors.LocalEntryNotFoundError:
    return None
  return path if any(list(path.glob(pattern)) for pattern in READERS) else None


def read(path):
  """{name: array} of all tensors under a path (a directory, or one .pth file)."""
  if path.is_file():
    return _read_torch(path)
  for pattern, reader in READERS.items():
    found = sorted(path.glob(pattern))
    if len(found) > 1:
      raise ValueError(f"{path} holds several checkpoints ({_names(found)}): keep one")
    if found:
      return reader(found[0])
  raise ValueError(f"{path} holds no weights: expected one of {', '.join(READERS)}")


def read_safetensors(path):
  try:
    with safetensors.safe_open(path, "np") as file:
      return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f"{path} is corrupt or half downloaded ({error}): fetch it again") from error


def _read_torch(path):
  try:
    import torch
  except ImportError as error:
    raise ValueError(
      f"reading {path} needs PyTorch (pip install torch); model.safetensors needs nothing more"
    ) from error
  try:  # weights_only: such a file is a pickle, and may otherwise run any code
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return {name: _numpy(tensor) for name, tensor in tensors.items()}
  except Exception as error:  # torch, zipfile and pickle each raise their own
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ValueError(f"{path} is not a readable dictionary of tensors ({reason})") from error


def _numpy(tensor):
  return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _read_shards(index):
  """Several files, and an index that maps each tensor to its file."""
  try:
    weight_map = json.loads(index.read_text())["weight_map"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{index} is not an index of weights ({error!r})") from error
  tensors = {}
  for shard in sorted(set(weight_map.values())):
    path = index.parent / shard
    if not path.exists():
      raise ValueError(f"{index.name} names {shard}, which is not in {index.parent}")
    tensors |= read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
  if missing := sorted(set(weight_map) - set(tensors)):
    raise ValueError(f"{index} promises tensors that its files do not hold: {_names(missing)}")
  return tensors


def _read_google(index):
  """BERT as published by its authors: a TensorFlow checkpoint, kernels input first."""
  from xe_retrieval.data.cpu_tensorflow import tf

  prefix = str(index).removesuffix(".index")
  try:
    reader = tf.train.load_checkpoint(prefix)
    variables = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
  except (tf.errors.OpError, RuntimeError, ValueError, LookupError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(
      f"{prefix} is corrupt or half downloaded ({reason}): fetch it again"
    ) from error
  tensors = {}
  for name, value in variables.items():
    name = re.sub(r"layer_(\d+)", r"layer.\1", name.replace("/", "."))
    name = re.sub(r"_embeddings$", "_embeddings.weight", name)
    if name.endswith(".kernel"):
      name, value = name.removesuffix(".kernel") + ".weight", value.T
    tensors[name] = value
  return tensors


READERS = {
  "model.safetensors.index.json": _read_shards,
  "model.safetensors": read_safetensors,
  "pytorch_model.bin.index.json": _read_shards,
  "pytorch_model.bin": _read_torch,
  "*.pth": _read_torch,
  "*.ckpt.index": _read_google,
}


def _names(items):
  return ", ".join(getattr(item, "name", str(item)) for item in items)
