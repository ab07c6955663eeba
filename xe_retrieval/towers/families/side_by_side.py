"""Several frozen towers side by side: each has an input of its own, features are joined.

config.text.pretrained or config.image.pretrained names them ("a,b", or a tuple);
pretrained.configure puts what it finds of each under config.text.towers or config.image.towers.
The features of each are cached as if it were the only tower.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from xe_retrieval import config as config_lib


@dataclasses.dataclass(frozen=True)
class Ids:
  """The columns of one text tower in the ids of all."""

  start: int
  stop: int

  def __call__(self, tokens):  # int32 [B, all] -> int32 [B, T]
    return tokens[:, self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class Square:
  """The pixels of one image tower in squares below each other, normalised."""

  top: int
  size: int
  mean: tuple[float, ...]  # per channel, pixels in 0..1
  std: tuple[float, ...]

  def __call__(self, pixels):  # float32 [B, H, W, 3] in 0..1 -> float32 [B, size, size, 3]
    own = pixels[:, self.top : self.top + self.size, : self.size]
    return (own - jnp.array(self.mean)) / jnp.array(self.std)


class SideBySide(nn.Module):
  """What all towers see -> the features of each, one after the other."""

  towers: tuple[nn.Module, ...]
  inputs: tuple[Callable, ...]  # what of it each tower sees: Ids or Square

  def __call__(self, x, train=False):  # -> float32 [B, widths]
    each = zip(self.towers, self.inputs, strict=True)
    features = [pooled(tower(own(x), train=False)) for tower, own in each]
    return jax.lax.stop_gradient(jnp.concatenate(features, axis=-1))

  @property
  def frozen(self):
    return len(self.towers)

  def parts(self):
    return [config_lib.tower_name(i) for i in range(len(self.towers))]

  def feature_width(self):
    return sum(tower.feature_width() for tower in self.towers)


class Standard(nn.Module):
  """Features of mean 0 and variance 1 over the training split, so that no tower drowns another."""

  @nn.compact
  def __call__(self, x):  # [B, width] -> [B, width]
    mean = self.variable("batch_stats", "mean", jnp.zeros, (x.shape[-1],))
    std = self.variable("batch_stats", "std", jnp.ones, (x.shape[-1],))
    return (x - mean.value) / std.value


def pooled(x):  # [B, width] or a feature map [B, H, W, width] -> float32 [B, width]
  x = x.astype(jnp.float32)
  return x.mean((1, 2)) if x.ndim == 4 else x


def sources(pretrained) -> list[str]:
  """The towers that `pretrained` names; [] where it is a single one, or none."""
  if isinstance(pretrained, str):
    if "," not in pretrained or pathlib.Path(pretrained).expanduser().exists():
      return []
    pretrained = pretrained.split(",")
  return [source for source in pretrained if source]


def several(config, encoder) -> bool:
  return "towers" in config[encoder]


def each(config, encoder) -> list[tuple[ConfigDict, tuple[str, ...]]]:
  """[(config as if there was only this tower, its place below `tower` in the variables)]."""
  if not several(config, encoder):
    return [(config, ())]
  own = config_lib.towers(config[encoder])
  return [(ConfigDict(config.to_dict() | {encoder: own[name]}), (name,)) for name in own]


def towers(config) -> list[tuple[str, ConfigDict, tuple[str, ...]]]:
  """The same of both encoders, with the name of the encoder first."""
  return [(encoder, *one) for encoder in ("text", "image") for one in each(config, encoder)]


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
