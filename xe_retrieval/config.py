"""Configs: parsing flags, validation, JSON, differences."""

import importlib.util
import json
import re
import sys

from absl import flags, logging
from ml_collections import ConfigDict

MAX_SCALE = 100.0  # of a learned scale; CLIP's
_BUCKET = re.compile(r"(\w+=)?(gs|s3|az|hf|hdfs|memory)://")  # also split=gs://…


def parse_flags(argv, remote=()):
  """absl's flag parser; exits with one sentence on a wrong field, and quiets library logs.

  Paths of the flags `remote` may be in a bucket; as a local path, gs://… would become ./gs:/….
  """
  try:
    rest = flags.FLAGS(argv)
  except (AttributeError, KeyError) as e:  # ml_collections raises these for unknown fields
    near = re.search(r'Did you mean "(.*?)" instead of "(.*?)"', str(e))
    wrong = [a for a in argv if near and f"{near[2]}=" in a] or [str(e)]
    hint = f"; did you mean {near[1]!r}?" if near else ""
    sys.exit(f"error: {wrong[0]}: the config has no such field{hint}")
  except (TypeError, ValueError, FileNotFoundError, flags.Error) as e:
    sys.exit(f"error: {e}")
  given = [("", rest[1:]), *((f"--{name}=", flags.FLAGS[name].value) for name in flags.FLAGS)]
  for name, value in given:
    for path in value if isinstance(value, list) else [value]:
      if isinstance(path, str) and _BUCKET.match(path) and name.strip("-=") not in remote:
        sys.exit(f"error: {name}{path} should be local: copy it, or mount the bucket")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.ERROR)
  return rest


def validate(config: ConfigDict, devices: int = 1, choices: dict | None = None) -> None:
  """ValueError that names the first field with an invalid value, and what is allowed.

  `choices` are the allowed names of fields that other modules define: {"loss": ("snm", …), …}.
  """
  validate_run(config, devices)
  for field in ("embedding_dim", "text.tokens", "image.size"):
    require(config, field, _get(config, field) >= 1, "at least 1")
  for field, allowed in (choices or {}).items():
    require(config, field, _get(config, field) in allowed, f"one of {', '.join(allowed)}")
  require(config, "keep", 0 < config.keep <= 1, "a share of the negatives in (0, 1]")
  require(config, "scale", config.scale > 0, "above 0")
  _validate_loss(config)
  for tower in ("text", "image"):
    validate_optimizer(config, tower)
    drops = config[tower].feature_dropout
    require(config, f"{tower}.feature_dropout", 0 <= drops < 1, "a share in [0, 1)")
  require(config, "text.dropout", 0 <= config.text.dropout < 1, "a share in [0, 1)")
  micro = config.micro_batch
  require(config, "micro_batch", micro >= 0, "at least 0")
  if micro and (config.batch_size % micro or micro % devices):
    raise ValueError(
      f"config.micro_batch={micro} should divide batch_size={config.batch_size} and be divisible "
      f"by the {devices} device(s)"
    )
  workers = config.data.get("workers", 0)  # runs of older versions have none
  require(config, "data.workers", workers >= -1, "at least -1")


def validate_run(config: ConfigDict, devices: int) -> None:
  """The fields of the loop, whatever it trains."""
  for field in ("steps", "batch_size", "log_every", "eval_every", "checkpoint_every"):
    require(config, field, config[field] >= 1, "at least 1")
  require(config, "keep_checkpoints", config.keep_checkpoints >= 1, "at least 1")
  if config.batch_size % devices:
    near = max(config.batch_size // devices, 1) * devices
    raise ValueError(
      f"config.batch_size={config.batch_size} does not divide over {devices} devices; {near} would"
    )
  require(config, "clip_norm", config.clip_norm >= 0, "at least 0")
  require(config, "ema_decay", 0 <= config.ema_decay < 1, "in [0, 1)")
  require(config, "keep_every", config.keep_every >= 0, "at least 0")
  profiled(config)
  if config.wandb and not importlib.util.find_spec("wandb"):
    raise ValueError(f"config.wandb={config.wandb!r} needs a package: pip install wandb")


def validate_optimizer(config: ConfigDict, part: str) -> None:
  """Learning rate and warm-up of config.text, config.image, …"""
  rate, warmup = config[part].learning_rate, config[part].warmup_steps
  require(config, f"{part}.learning_rate", rate >= 0, "at least 0")
  until = f"from 0 to steps={config.steps}"
  require(config, f"{part}.warmup_steps", 0 <= warmup <= config.steps, until)


def _validate_loss(config):
  """The fields that only some losses read."""
  if config.scale_learned:
    require(config, "scale", config.scale <= MAX_SCALE, f"at most {MAX_SCALE:g} to be learned")
  require(config, "correction", 0 <= config.correction <= 1, "in [0, 1]")
  require(config, "corrected_share", 0 < config.corrected_share <= 1, "in (0, 1]")
  if config.bias_learned:
    require(config, "loss", config.loss == "sigmoid", "sigmoid to learn a bias")
  require(config, "margin_floor", config.margin_floor > 0, "above 0")
  start, annealing = config.margin_start, config.margin_annealing
  require(config, "margin_start", start >= config.margin_floor, "at least margin_floor")
  require(config, "margin_annealing", 0 < annealing <= 1, "a share of the steps in (0, 1]")
  require(config, "tcm_weight", config.tcm_weight >= 0, "at least 0")
  for field in ("tcm_positive", "tcm_negative"):
    require(config, field, -1 <= config[field] <= 1, "a cosine in [-1, 1]")
  require(config, "mask", config.mask in ("ids", "diagonal"), "ids or diagonal")


def profiled(config: ConfigDict) -> range:
  """The steps of config.profile_steps ("10:15"), both ends included."""
  if not config.profile_steps:
    return range(0)
  match = re.fullmatch(r"(\d+):(\d+)", config.profile_steps)
  steps = match and range(int(match[1]), int(match[2]) + 1)
  require(config, "profile_steps", steps and steps[0] > 0, "the first and the last step, as 10:15")
  return steps


def to_json(config: ConfigDict) -> str:
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
  """The inverse of `to_json`: JSON's lists become tuples again."""
  return ConfigDict(_tuples(json.loads(text)))


def difference(old: ConfigDict, new: ConfigDict) -> list[str]:
  """One line per field that differs, `config.field: old → new`.

  A field that an older version did not know is as if it were empty. The number of worker processes
  is none of the run's: it changes nothing, and may be another on another machine.
  """
  before, after = flat(old), flat(new)
  return [
    f"config.{field}: {before.get(field, '(absent)')!r} → {after.get(field, '(absent)')!r}"
    for field in sorted((before | after).keys() - {"data.workers"})
    if before.get(field, "") != after.get(field, "")
  ]


def require(config, field, holds, allowed):
  """ValueError, if a field does not hold what is allowed."""
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


def towers(encoder: ConfigDict) -> dict[str, ConfigDict]:
  """config.text or config.image -> {name: its fields as if this tower was the only one}.

  The name of a single tower is ""; those of several are their names among the parameters.
  """
  if "towers" not in encoder:
    return {"": encoder}
  fields = encoder.to_dict()
  own = fields.pop("towers")
  return {name: ConfigDict(fields | own[name]) for name in map(tower_name, range(len(own)))}


def tower_name(i: int) -> str:
  return f"towers_{i}"


def flat(config: ConfigDict) -> dict:
  """{"text.layers": 12, …}."""
  from flax import traverse_util  # not at the top: --help should not wait for jax

  return traverse_util.flatten_dict(config.to_dict(), sep=".")


def updated(config: ConfigDict, fields: dict) -> ConfigDict:
  """A copy with these fields of `flat`, also new ones; JSON's lists become tuples."""
  from flax import traverse_util

  config = ConfigDict(config).copy_and_resolve_references()
  with config.unlocked():
    config.update(traverse_util.unflatten_dict(_tuples(fields), sep="."))
  return config
