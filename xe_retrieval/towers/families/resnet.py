"""ResNet (He et al. 2015) as transformers' ResNetModel, and from torchvision's files."""

import re

from xe_retrieval.towers.families.family import Family, require
from xe_retrieval.towers.resnet import ResNet

NAMES = {
  "embedder.embedder.convolution": "stem/conv",
  "embedder.embedder.normalization": "stem/norm",
  "encoder.stages.#.layers.#.layer.#.convolution": "stage_#_block_#/conv_#",
  "encoder.stages.#.layers.#.layer.#.normalization": "stage_#_block_#/norm_#",
  "encoder.stages.#.layers.#.shortcut.convolution": "stage_#_block_#/shortcut_conv",
  "encoder.stages.#.layers.#.shortcut.normalization": "stage_#_block_#/shortcut_norm",
}
_KINDS = {"conv": "convolution", "bn": "normalization", "0": "convolution", "1": "normalization"}


def _stem(match):  # conv1.weight
  return f"embedder.embedder.{_KINDS[match[1]]}.{match[2]}"


def _block(match):  # layer1.0.conv1.weight
  stage, block, kind, i, leaf = match.groups()
  return f"encoder.stages.{int(stage) - 1}.layers.{block}.layer.{int(i) - 1}.{_KINDS[kind]}.{leaf}"


def _shortcut(match):  # layer1.0.downsample.0.weight
  stage, block, kind, leaf = match.groups()
  return f"encoder.stages.{int(stage) - 1}.layers.{block}.shortcut.{_KINDS[kind]}.{leaf}"


def fields(theirs, file):
  require(file, "hidden_act", theirs.hidden_act, "relu")
  require(file, "num_channels", theirs.num_channels, 3)
  require(file, "downsample_in_first_stage", theirs.downsample_in_first_stage, False)
  return {
    "depths": tuple(theirs.depths),
    "widths": tuple(theirs.hidden_sizes),
    "block": theirs.layer_type,
    "stem": "imagenet",
    "stem_width": theirs.embedding_size,
    "downsample_in_bottleneck": theirs.downsample_in_bottleneck,
  }


def torchvision_fields(tensors, path):
  """The architecture, from names and shapes alone; torchvision's ResNets are always v1.5."""
  tensors = RESNET.canonical(tensors)
  blocks = [
    re.match(r"encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.conv", n) for n in tensors
  ]
  blocks = {tuple(map(int, match.groups())) for match in blocks if match}
  if not blocks or "embedder.embedder.convolution.weight" not in tensors:
    raise ValueError(f"{path} is not a torchvision ResNet, and there is no config.json beside it")
  stages = range(1 + max(stage for stage, _, _ in blocks))
  last = max(conv for _, _, conv in blocks)
  name = "encoder.stages.{}.layers.0.layer.{}.convolution.weight"
  return {
    "depths": tuple(1 + max(i for stage, i, _ in blocks if stage == s) for s in stages),
    "widths": tuple(tensors[name.format(stage, last)].shape[0] for stage in stages),
    "block": "bottleneck" if last == 2 else "basic",
    "stem": "imagenet",
    "stem_width": tensors["embedder.embedder.convolution.weight"].shape[0],
    "downsample_in_bottleneck": False,
  }


def tower(image, frozen, dtype, remat):
  return ResNet(
    depths=tuple(image.depths),
    widths=tuple(image.widths),
    block=image.block,
    stem=image.stem,
    stem_width=image.stem_width,
    downsample_in_bottleneck=image.downsample_in_bottleneck,
    batch_norm=image.batch_norm,
    frozen=frozen,
    dtype=dtype,
    remat=remat,
  )


def export(tower):
  """None for the patch stem, which transformers does not have."""
  from transformers import ResNetConfig

  return tower.stem == "imagenet" and ResNetConfig(
    architectures=["ResNetModel"],
    depths=list(tower.depths),
    hidden_sizes=list(tower.widths),
    layer_type=tower.block,
    embedding_size=tower.stem_width,
    downsample_in_bottleneck=tower.downsample_in_bottleneck,
  )


RESNET = Family(
  name="resnet",
  model_types=("resnet",),
  names=NAMES,
  reads=("depths", "widths", "block", "stem", "stem_width", "downsample_in_bottleneck"),
  fields=fields,
  tower=tower,
  export=export,
  aliases=(
    (r"^resnet\.", ""),  # of models saved with a head
    (r"^(conv|bn)1\.(\w+)$", _stem),
    (r"^layer(\d)\.(\d+)\.(conv|bn)(\d)\.(\w+)$", _block),
    (r"^layer(\d)\.(\d+)\.downsample\.(\d)\.(\w+)$", _shortcut),
  ),
  dropped=r"classifier\..*|fc\..*|.*\.num_batches_tracked",
)
