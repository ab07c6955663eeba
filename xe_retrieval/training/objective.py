"""What training minimises: config.loss, its learned scalars and those that follow the step."""

import math

import jax.numpy as jnp

from xe_retrieval import losses
from xe_retrieval.config import MAX_SCALE


def make_loss(config, mesh):
  """losses.get with every field of the config."""
  return losses.get(
    config.loss,
    config.scale,
    config.keep,
    config.loss_implementation,
    mesh,
    softening=config.margin_floor,
    correction=config.correction,
    corrected_share=config.corrected_share,
    tcm_weight=config.tcm_weight,
    tcm_positive=config.tcm_positive,
    tcm_negative=config.tcm_negative,
  )


def make(config, loss):
  """objective(text [B, D], image [B, D], ids, learned, step) -> []; learned: of `parameters`."""

  def objective(text, image, ids, learned, step):
    ids = ids if config.mask == "ids" else {}  # without ids, the negatives are off the diagonal
    return loss(text, image, **ids, **live(config, learned, step))

  return objective


def parameters(config) -> dict:
  """{"loss": what the loss learns}, a group beside text and image; {} if it learns nothing."""
  learned = {}
  if config.scale_learned:
    learned["log_scale"] = jnp.float32(math.log(config.scale))
  if config.bias_learned:
    learned["bias"] = jnp.float32(config.get("logit_bias", -math.log(config.batch_size)))
  return {"loss": learned} if learned else {}


def clip(params: dict) -> dict:
  """Keeps a learned scale below MAX_SCALE; called after each update, as CLIP does."""
  if "log_scale" not in params.get("loss", {}):
    return params
  log_scale = jnp.minimum(params["loss"]["log_scale"], math.log(MAX_SCALE))
  return params | {"loss": params["loss"] | {"log_scale": log_scale}}


def live(config, learned: dict, step) -> dict:
  """The scalars of losses.get at this step."""
  scalars = {"softening": softening(config, step)}
  if "log_scale" in learned:
    scalars["scale"] = jnp.exp(learned["log_scale"])
  if "bias" in learned:
    scalars["bias"] = learned["bias"]
  return scalars


def softening(config, step):
  """max(floor, start / (1 + a·step)), which reaches the floor after margin_annealing of the steps.

  L-Softmax's and A-Softmax's authors lower λ in this way, from 1,000 to 5 in 1,658 of 28,000 steps
  (SphereFace).
  """
  slope = (config.margin_start / config.margin_floor - 1) / (config.margin_annealing * config.steps)
  return jnp.maximum(config.margin_floor, config.margin_start / (1 + slope * step))
