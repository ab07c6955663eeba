"""Layer by layer outputs of transformers' PyTorch models, for test_parity.py.

  python tests/towers/make_references.py                   # the stored tiny models
  python tests/towers/make_references.py --out=DIR --full  # random models of real size
  python tests/towers/make_references.py MODEL_DIR…        # fingerprints of pretrained models

Needs torch. Each model gets an outputs.npz: inputs, one array per part of the tower, and for CLIP
and SigLIP the pooled features. Of a pretrained model, NAME.npz holds only 18 numbers per part.
"""

import argparse
import pathlib
import string
import tempfile

import numpy as np
import torch
import transformers as t
from make_captions import CAPTIONS  # this folder is the path of a script
from PIL import Image

SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=36)
TEXT = dict(**SMALL, vocab_size=40, max_position_embeddings=14)
TINY = {
  "bert": t.BertConfig(
    vocab_size=40,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=36,
    max_position_embeddings=12,
  ),
  "distilbert": t.DistilBertConfig(
    vocab_size=40, dim=24, n_layers=2, n_heads=3, hidden_dim=36, max_position_embeddings=14
  ),
  "mpnet": t.MPNetConfig(**TEXT),
  "roberta": t.RobertaConfig(**TEXT, type_vocab_size=1),
  "clip_text": t.CLIPTextConfig(**TEXT, eos_token_id=39, bos_token_id=38),
  "siglip_text": t.SiglipTextConfig(
    **{**TEXT, "max_position_embeddings": 12}, projection_size=20, bos_token_id=0, eos_token_id=1
  ),
  "resnet_v1": t.ResNetConfig(
    depths=[1, 2], hidden_sizes=[16, 32], embedding_size=8, downsample_in_bottleneck=True
  ),
  "resnet_v15": t.ResNetConfig(depths=[1, 2], hidden_sizes=[16, 32], embedding_size=8),
  "resnet_basic": t.ResNetConfig(
    depths=[1, 2], hidden_sizes=[8, 16], embedding_size=8, layer_type="basic"
  ),
  "vit": t.ViTConfig(**SMALL, image_size=40, patch_size=8),
  "dinov2": t.Dinov2Config(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    mlp_ratio=2,
    image_size=64,  # positions are interpolated
    patch_size=8,
  ),
  "dinov2_registers": t.Dinov2WithRegistersConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    mlp_ratio=2,
    image_size=40,
    patch_size=8,
    num_register_tokens=2,
  ),
  "clip_vision": t.CLIPVisionConfig(**SMALL, image_size=40, patch_size=8),
  "siglip_vision": t.SiglipVisionConfig(**SMALL, image_size=44, patch_size=8),  # 44 / 8: a rest
}
FULL = {
  "bert_base": t.BertConfig(),
  "mpnet_base": t.MPNetConfig(),
  "clip_text_base": t.CLIPTextConfig(),
  "siglip_text_base": t.SiglipTextConfig(),
  "resnet50": t.ResNetConfig(),
  "resnet18": t.ResNetConfig(
    layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]
  ),
  "vit_base": t.ViTConfig(),
  "dinov2_small": t.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518),
  "clip_vision_base": t.CLIPVisionConfig(),
  "siglip_vision_base": t.SiglipVisionConfig(),
}
SIZES = [(50, 90, 3), (64, 40, 3), (24, 24, 3)]
VISION = dict(**SMALL, image_size=24, patch_size=8)
DUAL = {
  "clip": t.CLIPConfig(
    text_config=dict(**TEXT, eos_token_id=2, bos_token_id=0),
    vision_config=VISION,
    projection_dim=16,
  ),
  "siglip": t.SiglipConfig(
    text_config=dict(**{**TEXT, "vocab_size": 80}, bos_token_id=0, eos_token_id=1),
    vision_config=VISION,
  ),
}
WITHOUT_POOLER = ("bert", "mpnet", "roberta", "xlm-roberta", "vit")
POOLED = ("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("models", nargs="*", type=pathlib.Path)
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "references"
  )
  parser.add_argument("--full", action="store_true")
  parser.add_argument("--only", default="", help="name of one model")
  args = parser.parse_args()
  torch.set_grad_enabled(False)
  for path in args.models:
    (kind,) = t.AutoConfig.from_pretrained(path).architectures
    kind = getattr(t, kind) if kind.endswith("Model") else t.AutoModel  # not one with a head
    inputs, outputs = run(kind.from_pretrained(path, dtype=torch.float32))
    outputs = {part: fingerprint(value) for part, value in outputs.items()}
    inputs.pop("pixels", None)  # large; test_parity.py draws the same pixels
    np.savez(args.out / f"{path.name}.npz", **inputs, **outputs)
  if args.models:
    return
  for name, config in ({} if args.full else DUAL).items():
    if args.only in ("", name):
      dual(name, config, args.out / name)
  for name, config in (FULL if args.full else TINY).items():
    if args.only in ("", name):
      model = random_model(config)
      model.save_pretrained(args.out / name)
      inputs, outputs = run(model)
      np.savez(args.out / name / "outputs.npz", **inputs, **outputs)


def dual(name, config, out):
  """A whole CLIP or SigLIP with its processor; features of captions and images, as files too."""
  out.mkdir(parents=True, exist_ok=True)
  tokenizer = {"clip": clip_tokenizer, "siglip": siglip_tokenizer}[name](out)
  config.text_config.vocab_size = len(tokenizer)
  processor = {
    "clip": lambda: t.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=24),
    "siglip": lambda: t.SiglipImageProcessor(size={"height": 24, "width": 24}),
  }[name]()
  model = random_model(config).eval()
  model.logit_scale.fill_(3.0)
  for part in (model, tokenizer, processor):
    part.save_pretrained(out)
  random = np.random.default_rng(1)
  images = [random.integers(0, 256, size, dtype=np.uint8) for size in SIZES]
  Image.fromarray(images[0]).save(out / "photo.jpg", quality=90)
  padding = "max_length" if name == "siglip" else True
  text = tokenizer(CAPTIONS, padding=padding, truncation=True, max_length=14, return_tensors="pt")
  text = {"input_ids": text["input_ids"]}  # SigLIP attends to padding; CLIP cannot see it
  seen = processor([*map(Image.fromarray, images), Image.open(out / "photo.jpg")])
  found = {
    "text": model.get_text_features(**text).pooler_output,
    "image": model.get_image_features(torch.tensor(np.stack(seen["pixel_values"]))).pooler_output,
  }
  found = {key: (x / x.norm(dim=-1, keepdim=True)).numpy() for key, x in found.items()}
  np.savez(out / "outputs.npz", **found, **{f"image_{i}": x for i, x in enumerate(images)})


def clip_tokenizer(out):
  letters = [*string.ascii_lowercase, *string.punctuation]
  merges = [("t", "h"), ("th", "e</w>"), ("r", "e"), ("re", "d</w>"), ("c", "a"), ("ca", "t</w>")]
  pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
  pieces += ["<|startoftext|>", "<|endoftext|>"]
  return t.CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)


def siglip_tokenizer(out):
  import sentencepiece

  with tempfile.TemporaryDirectory() as scratch:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([caption.lower() for caption in CAPTIONS if caption] * 20),
      model_prefix=f"{scratch}/spiece",
      vocab_size=40,
      hard_vocab_limit=False,
      normalization_rule_name="identity",  # others add 240 kB
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
    )
    return t.SiglipTokenizer(vocab_file=f"{scratch}/spiece.model", model_max_length=14)


def random_model(config):
  """Every parameter and statistic random: initial zeros and ones could hide swapped tensors."""
  torch.manual_seed(0)
  poolers = {"add_pooling_layer": False} if config.model_type in WITHOUT_POOLER else {}
  model = getattr(t, type(config).__name__.replace("Config", "Model"))(config, **poolers)
  around_one = ("LayerNorm.weight", "normalization.weight", "running_var", "norm.weight")
  around_one += ("norm1.weight", "norm2.weight", "before.weight", "after.weight", "lambda1")
  for name, value in [*model.named_parameters(), *model.named_buffers()]:
    if not value.is_floating_point() or not value.ndim:
      continue
    if value.ndim == 1:
      centre = 1 if name.endswith(around_one) else 0
      value.copy_(0.2 * torch.randn_like(value) + centre).abs_()
    elif "embedding" in name or "token" in name or "probe" in name:
      value.copy_(torch.randn_like(value) * (0.1 if "patch" in name else 0.4))
    elif config.model_type not in ("bert", "resnet"):
      value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
  return model


def run(model):
  """Inputs, and the output of every part of a model; images channels last."""
  model.eval()
  config = model.config
  if config.model_type == "resnet":
    return run_resnet(model)
  inputs = random_tokens(config) if hasattr(config, "vocab_size") else random_pixels(config)
  if "tokens" in inputs:
    tokens = torch.tensor(inputs["tokens"], dtype=torch.long)
    known = {} if config.model_type in POOLED else {"attention_mask": tokens != config.pad_token_id}
    found = model(tokens, output_hidden_states=True, **known)
  else:
    pixels = torch.tensor(inputs["pixels"].transpose(0, 3, 1, 2))
    found = model(pixels, output_hidden_states=True)
  names = ["embeddings", *(f"layer_{i}" for i in range(len(found.hidden_states) - 1))]
  outputs = dict(zip(names, found.hidden_states, strict=True))
  if config.model_type in POOLED:
    outputs["pooled"] = found.pooler_output
  elif hasattr(model, "layernorm"):
    outputs["pooled"] = found.last_hidden_state[:, 0]
  return inputs, {name: value.numpy() for name, value in outputs.items()}


def random_tokens(config):
  """Texts of 12, 5 and 11 tokens; those of CLIP end, those of SigLIP are all full."""
  pad = 1 if config.model_type in POOLED else config.pad_token_id
  tokens = np.random.default_rng(0).integers(2, config.vocab_size - 2, (3, 12))
  tokens[1, 5:] = tokens[2, 11:] = pad
  if config.model_type == "clip_text_model":
    tokens[np.arange(3), [11, 4, 7]] = config.eos_token_id
  return {"tokens": tokens.astype(np.int32)}


def random_pixels(config):
  size = config.image_size
  size = {518: 224, 64: 40}.get(size, size) if config.model_type.startswith("dinov2") else size
  pixels = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype(np.float32)
  return {"pixels": pixels}


def run_resnet(model):
  size, outputs = 224 if sum(model.config.depths) > 3 else 44, {}
  pixels = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype(np.float32)

  def keep(name):
    return lambda *args: outputs.update({name: args[-1].permute(0, 2, 3, 1)})

  model.embedder.register_forward_hook(keep("stem"))
  for i, stage in enumerate(model.encoder.stages):
    for j, block in enumerate(stage.layers):
      block.register_forward_hook(keep(f"stage_{i}_block_{j}"))
  model(torch.tensor(pixels.transpose(0, 3, 1, 2)))
  return {"pixels": pixels}, {name: value.numpy() for name, value in outputs.items()}


def fingerprint(x):
  """Sixteen values of an array, its mean and its standard deviation."""
  return np.array([*x.ravel()[:: x.size // 16][:16], x.mean(), x.std()], np.float32)


if __name__ == "__main__":
  main()
