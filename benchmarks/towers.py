"""BERT-base, ResNet-50 and ViT-B/32 against PyTorch: inference and training step on a CPU.

  python -m benchmarks.towers [--batch=8] [--repetitions=10] [--layers=12]

Same shapes and optimisers (AdamW, for ResNet SGD with momentum), float32,
PyTorch in channels_last; ours starts from uint8 pixels. Timed up to the pooled features.
Repetitions alternate between the two; a ratio compares the fastest of each.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from ml_collections import ConfigDict

from benchmarks import cpu_memory
from xe_retrieval.towers import families, pretrained
from xe_retrieval.towers.dual_encoder import ImageEncoder, TextEncoder
from xe_retrieval.towers.resnet import ResNet

TARGETS = {  # our time / PyTorch's
  "BERT-base inference": 1.0,
  "BERT-base training step": 1.0,
  "ResNet-50 inference": 1.0,
  "ResNet-50 training step": 1.3,
  "ViT-B/32 inference": 1.0,
  "ViT-B/32 training step": 1.0,
}
BASE = dict(width=768, heads=12, mlp=3072)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--repetitions", type=int, default=10)
  parser.add_argument("--only", default="", help="part of a row's name")
  parser.add_argument("--layers", type=int, default=12, help="of BERT and ViT; fewer for a try")
  args = parser.parse_args()

  cpu_memory.keep()  # for both sides
  random = np.random.default_rng(0)
  tokens = random.integers(1, 30522, (args.batch, 32), dtype=np.int32)
  images = random.integers(0, 256, (args.batch, 224, 224, 3), dtype=np.uint8)
  print(f"batch {args.batch}, {torch.get_num_threads()} threads, torch {torch.__version__}")
  print(f"{'':26}{'PyTorch':>10}{'ours':>10}{'ratio':>8}{'target':>8}")
  for name, (theirs, ours) in rows(tokens, images, args.layers).items():
    if args.only not in name:
      continue
    theirs, ours = measure([theirs(), ours()], args.repetitions)
    ratio = min(ours) / min(theirs)
    print(
      f"{name:26}{min(theirs) * 1e3:7.0f} ms{min(ours) * 1e3:7.0f} ms{ratio:8.2f}"
      f"{TARGETS[name]:8.1f}",
      flush=True,
    )


def rows(tokens, images, layers=12):
  """{name: (PyTorch, ours)}; each builds the function to be timed."""
  fields = dict(**BASE, vocab_size=30522, layers=layers, tokens=512, pooling="cls", dropout=0.1)
  bert = TextEncoder(tower("text", "bert", fields), 128)
  resnet = ImageEncoder(ResNet(), 128, **pretrained.IMAGENET)
  fields = dict(**BASE, blocks=layers, patch=32, size=224)
  vit = ImageEncoder(tower("image", "vit", fields), 128, **pretrained.IMAGENET)
  adamw, sgd = optax.adamw(1e-4), optax.sgd(1e-3, momentum=0.9)
  return {
    "BERT-base inference": (lambda: torch_bert(tokens, layers), lambda: inference(bert, tokens)),
    "BERT-base training step": (
      lambda: torch_bert(tokens, layers, lambda p: torch.optim.AdamW(p, 1e-4)),
      lambda: training(bert, tokens, adamw),
    ),
    "ResNet-50 inference": (lambda: torch_resnet(images), lambda: inference(resnet, images)),
    "ResNet-50 training step": (
      lambda: torch_resnet(images, lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9)),
      lambda: training(resnet, images, sgd),
    ),
    "ViT-B/32 inference": (lambda: torch_vit(images, layers), lambda: inference(vit, images)),
    "ViT-B/32 training step": (
      lambda: torch_vit(images, layers, lambda p: torch.optim.AdamW(p, 1e-4)),
      lambda: training(vit, images, adamw),
    ),
  }


def tower(encoder, family, fields):
  return families.FAMILIES[encoder][family].tower(ConfigDict(fields), 0, jnp.float32, False)


def measure(functions, repetitions):
  """Seconds per call of each function, called alternately; the first two calls do not count."""
  seconds = [[] for _ in functions]
  for repetition in range(repetitions + 2):
    for function, times in zip(functions, seconds, strict=True):
      time.sleep(0.1)  # PyTorch's threads busy-wait for a while after a call, on the same cores
      start = time.perf_counter()
      function()
      if repetition >= 2:
        times.append(time.perf_counter() - start)
  return seconds


def inference(encoder, x):
  variables = jax.jit(functools.partial(encoder.init, method="features"))(jax.random.key(0), x)
  features = jax.jit(lambda variables, x: encoder.apply(variables, x, method="features"))
  return lambda: np.asarray(features(variables, x))


def training(encoder, x, optimizer):
  variables = jax.jit(functools.partial(encoder.init, method="features"))(jax.random.key(0), x)
  params, stats = variables["params"], variables.get("batch_stats", {})
  state = [params, stats, optimizer.init(params), jax.random.key(0)]

  def step(params, stats, optimizer_state, key, x):
    key, dropout = jax.random.split(key)

    def loss(params):
      y, updates = encoder.apply(
        {"params": params, "batch_stats": stats},
        x,
        train=True,
        method="features",
        mutable=["batch_stats"],
        rngs={"dropout": dropout},
      )
      return jnp.square(y).mean(), updates.get("batch_stats", {})

    (value, stats_), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
    return value, optax.apply_updates(params, updates), stats_, optimizer_state, key

  step = jax.jit(step, donate_argnums=(0, 1, 2, 3))

  def run():
    value, *state[:] = step(*state, x)
    jax.block_until_ready((value, state))

  return run


def torch_bert(tokens, layers, optimizer=None):
  config = transformers.BertConfig(num_hidden_layers=layers)
  model = transformers.BertModel(config, add_pooling_layer=False)
  tokens = torch.tensor(tokens, dtype=torch.long)
  mask = tokens != 0
  return torch_function(
    model, lambda: model(tokens, attention_mask=mask).last_hidden_state[:, 0], optimizer
  )


def torch_resnet(images, optimizer=None):
  model = transformers.ResNetModel(transformers.ResNetConfig())
  model = model.to(memory_format=torch.channels_last)
  images = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
  images = images.contiguous(memory_format=torch.channels_last)
  return torch_function(model, lambda: model(images).pooler_output[..., 0, 0], optimizer)


def torch_vit(images, layers, optimizer=None):
  config = transformers.ViTConfig(patch_size=32, num_hidden_layers=layers)
  model = transformers.ViTModel(config, add_pooling_layer=False)
  images = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
  return torch_function(model, lambda: model(images).last_hidden_state[:, 0], optimizer)


def torch_function(model, embed, optimizer):
  if optimizer is None:
    model.eval()
    return torch.inference_mode()(lambda: embed().numpy())
  model.train()
  optimizer = optimizer(model.parameters())

  def run():
    optimizer.zero_grad()
    loss = embed().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

  return run


if __name__ == "__main__":
  main()
