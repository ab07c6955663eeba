"""Everything of the training step that a config and a mesh determine: no data, no real devices.

Training calls it with the devices at hand, `--dry_run` and `xe_retrieval.plan` with those of a
machine that may not exist: nothing is computed before the step is.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from xe_retrieval import losses
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import features, optimizers, step
from xe_retrieval.training import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Build:
  """The step and what goes in; `state` and `batch` are jax.ShapeDtypeStructs with shardings."""

  model: nn.Module
  loss: Callable
  optimizer: optax.GradientTransformation
  train_step: Callable  # jitted: state (donated), batch -> state, metrics
  state: step.TrainState
  batch: dict[str, jax.ShapeDtypeStruct]

  def lower(self):
    """The step, traced for these shapes; .compile() gives its memory and cost."""
    return self.train_step.lower(self.state, self.batch)


def build(config, mesh) -> Build:
  """Of a config whose architecture is filled in (see pretrained.configure)."""
  model = dual_encoder.from_config(config)
  variables = jax.eval_shape(lambda: step.init_variables(config, model))
  optimizer = optimizers.make(config, variables["params"])
  loss = losses.get(config.loss, config.scale, config.keep, config.loss_implementation, mesh)
  state = jax.eval_shape(lambda v: step.init(config, v, optimizer, mesh), variables)
  where = step.shardings(config, state, mesh)
  rows, everywhere = mesh_lib.rows(mesh), mesh_lib.everywhere(mesh)
  train_step = jax.jit(
    step.make(config, model, loss, optimizer, mesh),
    in_shardings=(where, rows),
    out_shardings=(where, everywhere),
    donate_argnums=0,
  )
  return Build(model, loss, optimizer, train_step, _at(state, where), batch(config, rows))


def batch(config, rows=None) -> dict[str, jax.ShapeDtypeStruct]:
  """One global batch; of a frozen tower with cached features, these instead of its input."""
  n, text, image = config.batch_size, config.text, config.image
  cached = features.cacheable(config)
  shapes = {
    "tokens": ((n, text.width), jnp.float32) if "text" in cached else ((n, text.tokens), jnp.int32),
    "image": ((n, image.widths[-1]), jnp.float32)
    if "image" in cached
    else ((n, image.size, image.size, 3), jnp.uint8),
    "text_id": ((n,), jnp.int32),
    "image_id": ((n,), jnp.int32),
  }
  return {name: jax.ShapeDtypeStruct(*x, sharding=rows) for name, x in shapes.items()}


def _at(tree, where):
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, where
  )
