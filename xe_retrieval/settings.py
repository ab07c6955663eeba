"""A config's first reader: every impossible value is one clear sentence, before any work."""

import importlib.util
import json
import re

from ml_collections import ConfigDict

from xe_retrieval import losses
from xe_retrieval.data import images
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import optimizers


def validate(config: ConfigDict, devices: int = 1) -> None:
  """ValueError that names the first field that cannot be, and what is allowed."""
  for field in ("steps", "batch_size", "log_every", "eval_every", "checkpoint_every"):
    _require(config, field, config[field] >= 1, "at least 1")
  for field in ("embedding_dim", "keep_checkpoints", "text.tokens", "image.size"):
    _require(config, field, _get(config, field) >= 1, "at least 1")
  _require(config, "loss", config.loss in losses.names(), "one of " + ", ".join(losses.names()))
  _require(config, "keep", 0 < config.keep <= 1, "a share of the negatives in (0, 1]")
  _require(config, "scale", config.scale > 0, "above 0")
  known, allowed = config.loss_implementation in losses.IMPLEMENTATIONS, losses.IMPLEMENTATIONS
  _require(config, "loss_implementation", known, f"one of {', '.join(allowed)}")
  allowed = ", ".join(images.AUGMENTS)
  _require(config, "data.augment", config.data.augment in images.AUGMENTS, f"one of {allowed}")
  for tower in ("text", "image"):
    allowed = ", ".join(optimizers.OPTIMIZERS)
    known = config[tower].optimizer in optimizers.OPTIMIZERS
    _require(config, f"{tower}.optimizer", known, f"one of {allowed}")
    _require(config, f"{tower}.learning_rate", config[tower].learning_rate >= 0, "at least 0")
    drops = config[tower].feature_dropout
    _require(config, f"{tower}.feature_dropout", 0 <= drops < 1, "a share in [0, 1)")
  if config.batch_size % devices:
    near = max(config.batch_size // devices, 1) * devices
    raise ValueError(
      f"config.batch_size={config.batch_size} does not divide over {devices} devices; {near} would"
    )
  micro = config.micro_batch
  _require(config, "micro_batch", micro >= 0, "at least 0")
  if micro and (config.batch_size % micro or micro % devices):
    raise ValueError(
      f"config.micro_batch={micro} should divide batch_size={config.batch_size} and be divisible "
      f"by the {devices} device(s)"
    )
  _require(config, "clip_norm", config.clip_norm >= 0, "at least 0")
  _require(config, "ema_decay", 0 <= config.ema_decay < 1, "in [0, 1)")
  _require(config, "keep_every", config.keep_every >= 0, "at least 0")
  profiled(config)
  if config.wandb and not importlib.util.find_spec("wandb"):
    raise ValueError(f"config.wandb={config.wandb!r} needs a package: pip install wandb")
  dual_encoder.from_config(config)  # the towers check their own fields


def profiled(config: ConfigDict) -> range:
  """The steps that config.profile_steps names, the last one included."""
  if not config.profile_steps:
    return range(0)
  match = re.fullmatch(r"(\d+):(\d+)", config.profile_steps)
  steps = match and range(int(match[1]), int(match[2]) + 1)
  _require(config, "profile_steps", steps and steps[0] > 0, "the first and the last step, as 10:15")
  return steps


def to_json(config: ConfigDict) -> str:
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
  """The inverse of `to_json`: lists come back as the tuples that they were."""
  return ConfigDict(_tuples(json.loads(text)))


def difference(old: ConfigDict, new: ConfigDict) -> list[str]:
  """One line per field that is not the same, `config.field: old → new`."""
  before, after = _flat(old.to_dict()), _flat(new.to_dict())
  return [
    f"config.{field}: {before.get(field, '(absent)')!r} → {after.get(field, '(absent)')!r}"
    for field in sorted(before | after)
    if before.get(field, ...) != after.get(field, ...)
  ]


def _require(config, field, holds, allowed):
  if not holds:
    raise ValueError(f"config.{field}={_get(config, field)!r} should be {allowed}")


def _get(config, field):
  for name in field.split("."):
    config = config[name]
  return config


def _tuples(value):
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _flat(value, prefix=""):
  if not isinstance(value, dict):
    return {prefix[:-1]: value}
  return {k: v for name in value for k, v in _flat(value[name], f"{prefix}{name}.").items()}
