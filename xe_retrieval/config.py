"""Configs: parsing flags, validation, JSON, differences."""

import importlib.util
import json
import re
import sys

from absl import flags, logging
from ml_collections import ConfigDict


def parse_flags(argv):
  """absl's flag parser; exits with one sentence on a wrong field, and quiets library logs."""
  try:
    rest = flags.FLAGS(argv)
  except (AttributeError, KeyError) as e:  # ml_collections raises these for unknown fields
    near = re.search(r'Did you mean "(.*?)" instead of "(.*?)"', str(e))
    wrong = [a for a in argv if near and f"{near[2]}=" in a] or [str(e)]
    hint = f"; did you mean {near[1]!r}?" if near else ""
    sys.exit(f"error: {wrong[0]}: the config has no such field{hint}")
  except (TypeError, ValueError, FileNotFoundError, flags.Error) as e:
    sys.exit(f"error: {e}")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.ERROR)
  return rest


def validate(config: ConfigDict, devices: int = 1, choices: dict | None = None) -> None:
  """ValueError that names the first field with an invalid value, and what is allowed.

  `choices` are the allowed names of fields that other modules define: {"loss": ("snm", …), …}.
  """
  for field in ("steps", "batch_size", "log_every", "eval_every", "checkpoint_every"):
    _require(config, field, config[field] >= 1, "at least 1")
  for field in ("embedding_dim", "keep_checkpoints", "text.tokens", "image.size"):
    _require(config, field, _get(config, field) >= 1, "at least 1")
  for field, allowed in (choices or {}).items():
    _require(config, field, _get(config, field) in allowed, f"one of {', '.join(allowed)}")
  _require(config, "keep", 0 < config.keep <= 1, "a share of the negatives in (0, 1]")
  _require(config, "scale", config.scale > 0, "above 0")
  for tower in ("text", "image"):
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


def profiled(config: ConfigDict) -> range:
  """The steps of config.profile_steps ("10:15"), both ends included."""
  if not config.profile_steps:
    return range(0)
  match = re.fullmatch(r"(\d+):(\d+)", config.profile_steps)
  steps = match and range(int(match[1]), int(match[2]) + 1)
  _require(config, "profile_steps", steps and steps[0] > 0, "the first and the last step, as 10:15")
  return steps


def to_json(config: ConfigDict) -> str:
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
  """The inverse of `to_json`: JSON's lists become tuples again."""
  return ConfigDict(_tuples(json.loads(text)))


def difference(old: ConfigDict, new: ConfigDict) -> list[str]:
  """One line per field that differs, `config.field: old → new`."""
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


def _flat(fields):
  from flax import traverse_util  # not at the top: --help should not wait for jax

  return traverse_util.flatten_dict(fields, sep=".")
