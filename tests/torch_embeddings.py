"""Embeds with an exported directory by transformers and torch alone, for test_export.py."""

import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoImageProcessor, AutoTokenizer, BertModel, ResNetModel


@torch.inference_mode()
def main(exported, pooling, folder):
  exported, folder = pathlib.Path(exported), pathlib.Path(folder)
  projections = load_file(exported / "projections.safetensors")

  bert, loading = BertModel.from_pretrained(
    exported / "text", add_pooling_layer=False, output_loading_info=True
  )
  assert not any(loading.values()), loading
  tokenizer = AutoTokenizer.from_pretrained(exported / "text")
  captions = json.loads((folder / "captions.json").read_text())
  tokens = tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
  hidden = bert(**tokens).last_hidden_state
  mask = tokens["attention_mask"][..., None]
  text = hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)

  resnet, loading = ResNetModel.from_pretrained(exported / "image", output_loading_info=True)
  assert not any(loading.values()), loading
  processor = AutoImageProcessor.from_pretrained(exported / "image")
  pixels = processor(list(np.load(folder / "images.npy")), return_tensors="pt")
  image = resnet(**pixels).pooler_output.flatten(1)

  embeddings = {}
  for name, x in (("text", text), ("image", image)):
    head = {k.removeprefix(f"{name}."): v for k, v in projections.items() if k.startswith(name)}
    if "trunk_in.weight" in head:
      y = layer_norm(x, x.shape[1:], head["trunk_norm.weight"], head["trunk_norm.bias"], 1e-6)
      y = gelu(linear(y, head["trunk_in.weight"], head["trunk_in.bias"]), approximate="tanh")
      x = x + linear(y, head["trunk_out.weight"], head["trunk_out.bias"])
    x = x @ head["weight"].T
    embeddings[name] = (x / x.norm(dim=-1, keepdim=True)).numpy()
  np.savez(folder / "embeddings.npz", **embeddings)


if __name__ == "__main__":
  main(*sys.argv[1:])
