"""A training step of the joint encoder on a batch of candidate lists.

The score that is trained is config.first_weight · scale · s + logit, s the first stage's score.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.losses import candidates
from xe_retrieval.towers import joint
from xe_retrieval.training import optimizers
from xe_retrieval.training import step as steps

PERCENTILES = (5, 50, 95)


@dataclasses.dataclass(frozen=True)
class Build:
  """The jitted step and its state as jax.ShapeDtypeStructs with shardings."""

  model: nn.Module
  optimizer: optax.GradientTransformation
  train_step: Callable  # jitted: state (donated), batch -> state, metrics
  state: steps.TrainState


def build(config, mesh) -> Build:
  """`config` is resolved, see settings.resolve."""
  model = joint.from_config(config)
  optimizer = optimizers.clipped(config, optimizers.of(config.joint, config.steps))
  state = jax.eval_shape(lambda: _start(config, model, optimizer))
  where = steps.shardings(config, state, mesh)
  everywhere = mesh_lib.replicated(mesh)
  train_step = jax.jit(
    make(config, model, optimizer, mesh),
    in_shardings=(where, mesh_lib.rows(mesh)),
    out_shardings=(where, everywhere),
    donate_argnums=0,
  )
  state = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, where
  )
  return Build(model, optimizer, train_step, state)


def init(config, built: Build):
  """The state before the first step, drawn from config.seed."""
  where = jax.tree.map(lambda x: x.sharding, built.state)
  start = jax.jit(lambda: _start(config, built.model, built.optimizer), out_shardings=where)
  return start()


def variables(config, model):
  """{"params": {"joint": …}} drawn from config.seed."""
  text = jnp.zeros([1, 8, config.tokens.text_width], jnp.float16)
  image = jnp.zeros([1, config.tokens.places, config.tokens.image_width], jnp.float16)
  known, one = jnp.ones([1, 8], bool), jnp.zeros([1, 1])
  found = model.init(
    jax.random.PRNGKey(config.seed), text, known, image, one.astype(jnp.int32), one
  )
  return {"params": {"joint": found["params"]}}


def _start(config, model, optimizer):
  return steps.start(config, variables(config, model)["params"], optimizer, {})


def make(config, model, optimizer, mesh):
  """train_step(state, batch of batches.Batches) -> state, metrics."""
  loss = candidates.get(config.loss)
  rate = optimizers.schedule(config.joint, config.steps)
  everywhere = mesh_lib.replicated(mesh)

  def train_step(state, batch):
    at = state.step
    rng = jax.random.fold_in(state.rng, at)
    inputs = {name: batch[name] for name in ("text", "known", "image", "rows")}
    first = config.scale * batch["first"]

    def value(params):
      params = jax.lax.with_sharding_constraint(params["joint"], everywhere)
      logits = model.apply(
        {"params": params}, **inputs, first=first, train=True, rngs={"dropout": rng}
      )
      scores = config.first_weight * first + logits  # [B, K]
      with jax.named_scope("loss"):
        return loss(scores, batch["negative"]), scores

    (lost, scores), grads = jax.value_and_grad(value, has_aux=True)(state.params)
    state, norms, finite = steps.advance(config, optimizer, mesh, state, grads, {})
    metrics = {
      "loss": lost,
      **norms,
      "learning_rate/joint": rate(at),
      **_figures(first, scores, batch["negative"], everywhere),
      "finite": finite & jnp.isfinite(lost),
    }
    return state, metrics

  return train_step


def _figures(first, scores, negative, everywhere):
  """How often the own image is first in its list, before and after; percentiles of scores."""
  gathered = jax.lax.with_sharding_constraint((first, scores, negative), everywhere)
  first, scores, negative = gathered

  def on_top(scores):
    others = jnp.max(scores, axis=1, where=negative, initial=-jnp.inf)
    return 100 * jnp.mean(scores[:, 0] > others)

  wrong = jnp.where(negative, scores, jnp.nan)
  return {
    "list_recall@1/first_stage": on_top(first),
    "list_recall@1/reranked": on_top(scores),
    **{
      f"score/{name}_p{q:02}": value
      for name, values in (("positive", scores[:, 0]), ("negative", wrong))
      for q, value in zip(
        PERCENTILES, jnp.nanpercentile(values, np.array(PERCENTILES, np.float32)), strict=True
      )
    },
  }
