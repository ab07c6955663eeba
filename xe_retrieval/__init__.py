"""Image-text retrieval with calibrated scores: Cross-Example Softmax on JAX/Flax."""

import importlib.metadata
import importlib.util
import os
import pathlib


def load(path, which="best", revision=""):
  """The model of a workdir (its best or latest checkpoint) or of an exported directory.

  Also a Hugging Face CLIP or SigLIP as it is, its directory or id; or the id of what
  `export --push` has sent to the Hub. `revision` is a commit, tag or branch there.

  model.embed_text(["two dogs on a beach"])        -> float32 [1, D], unit norm
  model.embed_images(["a.jpg", array, pil_image])  -> float32 [3, D], unit norm
  """
  from xe_retrieval import model  # here: keeps `import xe_retrieval` cheap

  return model.load(path, which, revision)


def _libtpu_for_nothing(devices: str = "/sys/bus/pci/devices") -> bool:
  """Whether libtpu is there (`plan` compiles with it), but no TPU and no plugin for another device.

  JAX would load it wherever it asks for devices, and it prints errors if there is no TPU.
  """
  if not importlib.util.find_spec("libtpu"):
    return False
  plugins = importlib.metadata.entry_points(group="jax_plugins")
  vendors = [file.read_text().strip() for file in pathlib.Path(devices).glob("*/vendor")]
  google = "0x1ae0"  # TPUs, and network cards of virtual machines that may have some
  return not (plugins or importlib.util.find_spec("jax_plugins") or google in vendors)


if "JAX_PLATFORMS" not in os.environ and _libtpu_for_nothing():
  os.environ["JAX_PLATFORMS"] = "cpu"
