"""Several frozen image towers side by side: each sees pixels of its own, features are joined.

config.image.pretrained names them ("a,b", or a tuple); pretrained.configure puts what it finds of
each under config.image.towers. The features of each are cached as if it were the only tower.
"""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict


class SideBySide(nn.Module):
  """Squares below each other -> the features of all towers, one after the other."""

  towers: tuple[nn.Module, ...]
  spans: tuple[tuple[int, int], ...]  # of each tower's square: its first row, and its size
  means: tuple[tuple[float, ...], ...]  # per tower and channel, pixels in 0..1
  stds: tuple[tuple[float, ...], ...]

  def __call__(self, x, train=False):  # float32 [B, H, W, 3] in 0..1 -> float32 [B, widths]
    each = zip(self.towers, self.spans, self.means, self.stds, strict=True)
    features = []
    for tower, (top, size), mean, std in each:
      y = (x[:, top : top + size, :size] - jnp.array(mean)) / jnp.array(std)
      features.append(pooled(tower(y, train=False)))
    return jax.lax.stop_gradient(jnp.concatenate(features, axis=-1))

  @property
  def frozen(self):
    return len(self.towers)

  def parts(self):
    return [name(i) for i in range(len(self.towers))]

  def feature_width(self):
    return sum(tower.feature_width() for tower in self.towers)


class Standard(nn.Module):
  """Features of mean 0 and variance 1 over the training images, so that no tower drowns another."""

  @nn.compact
  def __call__(self, x):  # [B, width] -> [B, width]
    mean = self.variable("batch_stats", "mean", jnp.zeros, (x.shape[-1],))
    std = self.variable("batch_stats", "std", jnp.ones, (x.shape[-1],))
    return (x - mean.value) / std.value


def pooled(x):  # [B, width] or a feature map [B, H, W, width] -> float32 [B, width]
  x = x.astype(jnp.float32)
  return x.mean((1, 2)) if x.ndim == 4 else x


def name(i):
  """Of tower number i, in config.image.towers and among the parameters."""
  return f"towers_{i}"


def sources(pretrained) -> list[str]:
  """The towers that config.image.pretrained names; [] where it is a single one, or none."""
  if isinstance(pretrained, str):
    if "," not in pretrained or pathlib.Path(pretrained).expanduser().exists():
      return []
    pretrained = pretrained.split(",")
  return [source for source in pretrained if source]


def several(config) -> bool:
  return "towers" in config.image


def each(config, encoder="image") -> list[tuple[ConfigDict, tuple[str, ...]]]:
  """[(config as if there was only this tower, its place below `tower` in the variables)]."""
  if encoder == "text" or not several(config):
    return [(config, ())]
  return [(_alone(config, name(i)), (name(i),)) for i in range(len(config.image.towers))]


def towers(config) -> list[tuple[str, ConfigDict, tuple[str, ...]]]:
  """The same of both encoders, with the name of the encoder first."""
  return [(encoder, *one) for encoder in ("text", "image") for one in each(config, encoder)]


def _alone(config, tower):
  fields = config.to_dict()
  towers = fields["image"].pop("towers")
  fields["image"] |= towers[tower]
  return ConfigDict(fields)


def take(variables, encoder, place) -> dict:
  """{"params": …, "batch_stats": …} of one tower, of the collections that it has."""
  found = {}
  for collection, tree in variables.items():
    for key in (encoder, "tower", *place):
      tree = tree.get(key, None) if tree is not None else None
    if tree is not None:
      found[collection] = tree
  return found


def put(variables, encoder, place, tower) -> None:
  """Replaces what `take` gives; in place, so `variables` should be nested dicts of one's own."""
  *above, last = (encoder, "tower", *place)
  for collection, value in tower.items():
    tree = variables[collection]
    for key in above:
      tree = tree[key]
    tree[last] = value
