"""A re-ranker's config: what is allowed, and what its first stage brings along."""

from ml_collections import ConfigDict

from xe_retrieval import config as config_lib
from xe_retrieval.losses import candidates
from xe_retrieval.reranking.first_stage import FirstStage
from xe_retrieval.towers import joint
from xe_retrieval.training import optimizers


def is_reranker(config) -> bool:
  return "first_stage" in config


def resolve(config, first: FirstStage) -> ConfigDict:
  """The config with the data, the scale and the token shapes of its first stage."""
  places, width = first.towers.image_shape
  brought = {
    "data.name": first.config.data.name,
    "data.dir": first.config.data.dir,
    "tokens.text_width": first.towers.text_width,
    "tokens.image_width": width,
    "tokens.places": places,
    "tokens.towers": first.towers.fingerprint(),
    "scale": first.scale,
  }
  return config_lib.updated(config, brought)


def validate(config, devices: int = 1) -> None:
  """ValueError that names the first field with an invalid value."""
  config_lib.validate_run(config, devices)
  config_lib.validate_optimizer(config, "joint")
  allowed = {"loss": tuple(candidates.SCOPES), "joint.optimizer": optimizers.OPTIMIZERS}
  for field, names in allowed.items():
    config_lib.require(config, field, _get(config, field) in names, f"one of {', '.join(names)}")
  for field, least in (("hard", 0), ("mined", max(config.hard, 1)), ("candidates", 2)):
    config_lib.require(config, field, config[field] >= least, f"at least {least}")
  pool = config.batch_size * (1 + config.hard)
  fits = 1 + config.hard <= config.candidates <= pool
  meaning = f"from {1 + config.hard}, the own image and config.hard, to {pool}, a batch's images"
  config_lib.require(config, "candidates", fits, meaning)
  for field in ("validation_captions", "validation_candidates"):
    config_lib.require(config, field, config[field] >= 1, "at least 1")
  joint.from_config(config)  # checks its own fields


def _get(config, field):
  for name in field.split("."):
    config = config[name]
  return config
