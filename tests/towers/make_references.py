"""Layer by layer outputs of transformers' BertModel and ResNetModel, for test_parity.py.

  python tests/towers/make_references.py                   # the stored tiny models
  python tests/towers/make_references.py --out=DIR --full  # random models of real size
  python tests/towers/make_references.py MODEL_DIR…        # fingerprints of pretrained models

Needs torch. Each model gets an outputs.npz: inputs, and one array per part of the tower. Of a
pretrained model, NAME.npz holds only 18 numbers per part.
"""

import argparse
import pathlib

import numpy as np
import torch
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

TINY = {
  "bert": BertConfig(
    vocab_size=40,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=36,
    max_position_embeddings=12,
  ),
  "resnet_v1": ResNetConfig(
    depths=[1, 2], hidden_sizes=[16, 32], embedding_size=8, downsample_in_bottleneck=True
  ),
  "resnet_v15": ResNetConfig(depths=[1, 2], hidden_sizes=[16, 32], embedding_size=8),
  "resnet_basic": ResNetConfig(
    depths=[1, 2], hidden_sizes=[8, 16], embedding_size=8, layer_type="basic"
  ),
}
FULL = {
  "bert_base": BertConfig(),
  "resnet50": ResNetConfig(),
  "resnet18": ResNetConfig(
    layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]
  ),
}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("models", nargs="*", type=pathlib.Path)
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "references"
  )
  parser.add_argument("--full", action="store_true")
  args = parser.parse_args()
  torch.set_grad_enabled(False)
  for path in args.models:
    kind = BertModel if (path / "vocab.txt").exists() else ResNetModel
    inputs, outputs = run(kind.from_pretrained(path, dtype=torch.float32))
    outputs = {part: fingerprint(value) for part, value in outputs.items()}
    inputs.pop("pixels", None)  # large; test_parity.py draws the same pixels
    np.savez(args.out / f"{path.name}.npz", **inputs, **outputs)
  if args.models:
    return
  for name, config in (FULL if args.full else TINY).items():
    model = random_model(config)
    model.save_pretrained(args.out / name)
    inputs, outputs = run(model)
    np.savez(args.out / name / "outputs.npz", **inputs, **outputs)


def random_model(config):
  """Every parameter and statistic random: initial zeros and ones could hide swapped tensors."""
  torch.manual_seed(0)
  if config.model_type == "bert":
    model = BertModel(config, add_pooling_layer=False)
  else:
    model = ResNetModel(config)
  for name, value in [*model.named_parameters(), *model.named_buffers()]:
    if not value.is_floating_point():
      continue
    if value.ndim == 1:
      around_one = name.endswith(("LayerNorm.weight", "normalization.weight", "running_var"))
      value.copy_(0.2 * torch.randn_like(value) + (1 if around_one else 0)).abs_()
    elif "embeddings" in name:
      value.mul_(20)
  return model


def run(model):
  """Inputs, and the output of every part of a model; images channels last."""
  model.eval()
  random = np.random.default_rng(0)
  if model.config.model_type == "bert":
    tokens = random.integers(1, model.config.vocab_size, (3, 12))
    tokens[1, 5:] = tokens[2, 11:] = 0
    token_types = (np.arange(12) > 6) * np.array([[1], [0], [1]])
    inputs = {"tokens": tokens.astype(np.int32), "token_types": token_types.astype(np.int32)}
    tokens, token_types = torch.tensor(tokens), torch.tensor(token_types)
    hidden = model(
      tokens, attention_mask=tokens != 0, token_type_ids=token_types, output_hidden_states=True
    ).hidden_states
    names = ["embeddings", *(f"layer_{i}" for i in range(len(hidden) - 1))]
    outputs = dict(zip(names, hidden, strict=True))
  else:
    size = 224 if sum(model.config.depths) > 3 else 44
    pixels = random.normal(size=(2, size, size, 3)).astype(np.float32)
    inputs, outputs = {"pixels": pixels}, {}

    def keep(name):
      return lambda *args: outputs.update({name: args[-1].permute(0, 2, 3, 1)})

    model.embedder.register_forward_hook(keep("stem"))
    for i, stage in enumerate(model.encoder.stages):
      for j, block in enumerate(stage.layers):
        block.register_forward_hook(keep(f"stage_{i}_block_{j}"))
    model(torch.tensor(pixels.transpose(0, 3, 1, 2)))
  return inputs, {name: value.numpy() for name, value in outputs.items()}


def fingerprint(x):
  """Sixteen values of an array, its mean and its standard deviation."""
  return np.array([*x.ravel()[:: x.size // 16][:16], x.mean(), x.std()], np.float32)


if __name__ == "__main__":
  main()
