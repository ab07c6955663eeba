"""One training step on the global batch.

`build` only traces shapes, so `xe_retrieval.plan` can build the step for devices that do not exist.
"""

import dataclasses
from collections.abc import Callable

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import features, objective, optimizers

PERCENTILES = (5, 50, 95)
SAMPLE = 64  # rows among which percentiles of negative scores are taken


@flax.struct.dataclass
class TrainState:
  """The state of training, as saved in checkpoints."""

  step: jax.Array  # int32 []
  params: dict  # {"text": …, "image": …}, and "loss" if it learns; see objective.parameters
  batch_stats: dict  # running statistics of BatchNorm
  opt_state: optax.OptState
  rng: jax.Array  # dropout of step n uses fold_in(rng, n)
  ema: dict = flax.struct.field(default_factory=dict)  # moving averages of both; {}: off

  def variables(self) -> dict:
    """What the model needs: its parameters and BatchNorm statistics, or their moving averages."""
    used = self.ema or {"params": self.params, "batch_stats": self.batch_stats}
    return used | {"params": _towers(used["params"])}


@dataclasses.dataclass(frozen=True)
class Build:
  """The jitted step and its inputs as jax.ShapeDtypeStructs with shardings."""

  model: nn.Module
  loss: Callable
  optimizer: optax.GradientTransformation
  train_step: Callable  # jitted: state (donated), batch -> state, metrics
  state: TrainState
  batch: dict[str, jax.ShapeDtypeStruct]

  def lower(self):
    """jax.stages.Lowered; .compile() gives memory and cost."""
    return self.train_step.lower(self.state, self.batch)


def build(config, mesh) -> Build:
  """`config` has its architecture filled in, see pretrained.configure."""
  model = dual_encoder.from_config(config)
  variables = jax.eval_shape(lambda: dual_encoder.init(config, model))
  optimizer = optimizers.make(config, variables["params"] | objective.parameters(config))
  loss = objective.make_loss(config, mesh)
  state = jax.eval_shape(lambda v: init(config, v, optimizer, mesh), variables)
  where = shardings(config, state, mesh)
  rows, everywhere = mesh_lib.rows(mesh), mesh_lib.replicated(mesh)
  train_step = jax.jit(
    make(config, model, loss, optimizer, mesh),
    in_shardings=(where, rows),
    out_shardings=(where, everywhere),
    donate_argnums=0,
  )
  state = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, where
  )
  return Build(model, loss, optimizer, train_step, state, batch(config, rows))


def batch(config, rows=None) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of one global batch, with features in place of a cached tower's input."""
  n, text, image = config.batch_size, config.text, config.image
  cached, widths = features.cacheable(config), dual_encoder.feature_widths(config)
  shapes = {"text_id": ((n,), jnp.int32), "image_id": ((n,), jnp.int32)}
  if "text" in cached:
    shapes["text_features"] = (n, widths["text"]), jnp.float32
  else:
    shapes["tokens"] = (n, text.tokens), jnp.int32
  if "image" in cached:
    shapes["image_features"] = (n, widths["image"]), jnp.float32
  else:
    shapes["image"] = (n, image.size, image.size, 3), jnp.uint8
  return {name: jax.ShapeDtypeStruct(*x, sharding=rows) for name, x in shapes.items()}


def init(config, variables, optimizer, mesh) -> TrainState:
  """The state before the first step, sharded as config.mesh says."""
  learned = objective.parameters(config)

  def build(variables):
    return start(config, variables["params"] | learned, optimizer, variables.get("batch_stats", {}))

  where = shardings(config, jax.eval_shape(build, variables), mesh)
  return jax.jit(build, out_shardings=where)(variables)


def start(config, params, optimizer, batch_stats) -> TrainState:
  """Step 0 of any model with these parameters."""
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    params=params,
    batch_stats=batch_stats,
    opt_state=optimizer.init(params),
    rng=jax.random.PRNGKey(config.seed),
    ema={"params": params, "batch_stats": batch_stats} if config.ema_decay else {},
  )


def shardings(config, state: TrainState, mesh) -> TrainState:
  """A sharding for each array of the state: replicated, or sharded if config.mesh says so."""
  everywhere = mesh_lib.replicated(mesh)
  if config.mesh.shard_parameters:
    return mesh_lib.fsdp(mesh, state)
  return jax.tree.map(lambda _: everywhere, state)


def make(config, model, loss, optimizer, mesh):
  """train_step(state, batch) -> state, metrics; rows of the batch are sharded over the mesh."""
  micro = config.micro_batch or config.batch_size
  gradients = _whole if micro == config.batch_size else _in_micro_batches
  rates = {tower: optimizers.schedule(config[tower], config.steps) for tower in ("text", "image")}
  everywhere = mesh_lib.replicated(mesh)
  minimised = objective.make(config, loss)

  def embed(params, batch_stats, rng, inputs):  # -> ([B, D], [B, D]), batch_stats
    params = jax.lax.with_sharding_constraint(params, everywhere)  # all-gather, if sharded
    variables = {"params": params, "batch_stats": batch_stats}
    embeddings, updated = model.apply(
      variables, **inputs, train=True, rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    return embeddings, updated.get("batch_stats", batch_stats)  # absent if no tower ran

  def train_step(state, batch):
    at, learned = state.step, state.params.get("loss", {})
    rng = jax.random.fold_in(state.rng, at)
    ids = {name: batch[name] for name in ("text_id", "image_id")}
    inputs = {name: x for name, x in batch.items() if name not in ids}

    @jax.named_scope("loss")
    def value_of(text, image, learned):
      return minimised(text, image, ids, learned, at)

    value, grads, embeddings, batch_stats = gradients(
      embed, value_of, state, rng, inputs, micro, mesh
    )
    state, norms, finite = advance(config, optimizer, mesh, state, grads, batch_stats)
    metrics = {
      "loss": value,
      **norms,
      **{f"learning_rate/{tower}": rate(at) for tower, rate in rates.items()},
      **{f"learned/{name}": x for name, x in learned.items()},
      **_percentiles(*embeddings, batch, mesh),
      "finite": finite & jnp.isfinite(value),
    }
    return state, metrics

  return train_step


def advance(config, optimizer, mesh, state, grads, batch_stats):
  """One update by the gradients -> the state after it, {norm of each group}, are they finite."""
  grads = jax.lax.with_sharding_constraint(grads, shardings(config, grads, mesh))
  with jax.named_scope("optimizer"):
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = objective.clip(optax.apply_updates(state.params, updates))
  norms = {f"gradient_norm/{group}": optax.global_norm(grads[group]) for group in sorted(grads)}
  finite = jnp.isfinite(sum(norms.values()) + optax.global_norm(updates))
  new = {"params": params, "batch_stats": batch_stats}
  ema = optax.incremental_update(new, state.ema, 1 - config.ema_decay) if state.ema else {}
  return state.replace(step=state.step + 1, opt_state=opt_state, ema=ema, **new), norms, finite


def _towers(params):
  return {name: group for name, group in params.items() if name != "loss"}


def _whole(embed, value_of, state, rng, inputs, micro, mesh):
  """-> loss, gradients, embeddings, BatchNorm statistics; holds all activations at once."""

  def value(params):
    embeddings, batch_stats = embed(_towers(params), state.batch_stats, rng, inputs)
    return value_of(*embeddings, params.get("loss", {})), (embeddings, batch_stats)

  (value, (embeddings, batch_stats)), grads = jax.value_and_grad(value, has_aux=True)(state.params)
  return value, grads, embeddings, batch_stats


def _in_micro_batches(embed, value_of, state, rng, inputs, micro, mesh):
  """The same with the activations of `micro` rows at a time, at the cost of a forward pass.

  Embed all rows without gradient, take the gradient of the loss with respect to the embeddings,
  then embed again and backpropagate it; the same rng gives the same dropout. BatchNorm normalises
  by the statistics of a micro-batch; the running ones move once per step, towards their mean.
  """
  towers, learned = _towers(state.params), state.params.get("loss", {})
  count = len(jax.tree.leaves(inputs)[0]) // micro
  rngs = jax.random.split(rng, count)
  parts = jax.tree.map(lambda x: _split(x, count, mesh), inputs)  # [count, micro, …]
  embeddings = jax.lax.map(
    lambda part: embed(towers, state.batch_stats, *part)[0], (rngs, parts)
  )  # [count, micro, D] twice
  embeddings = jax.tree.map(lambda x: _join(x, mesh), embeddings)  # [B, D]
  value, (*cotangents, slopes) = jax.value_and_grad(value_of, (0, 1, 2))(*embeddings, learned)
  cotangents = jax.tree.map(lambda x: _split(x, count, mesh), cotangents)

  def add(total, part):
    rng, inputs, cotangent = part
    forward = lambda params: embed(params, state.batch_stats, rng, inputs)  # noqa: E731
    _, backward, batch_stats = jax.vjp(forward, towers, has_aux=True)
    return jax.tree.map(jnp.add, total, *backward(cotangent)), batch_stats

  zeros = jax.tree.map(jnp.zeros_like, towers)
  grads, batch_stats = jax.lax.scan(add, zeros, (rngs, parts, tuple(cotangents)))
  grads |= {"loss": slopes} if learned else {}
  return value, grads, embeddings, jax.tree.map(lambda x: x.mean(0), batch_stats)


def _split(x, count, mesh):
  """[B, …] -> [count, B / count, …] without communication: part i takes rows of every device."""
  x = x.reshape(mesh.size, count, -1, *x.shape[1:]).swapaxes(0, 1)
  x = x.reshape(count, -1, *x.shape[3:])
  spec = PartitionSpec(None, mesh_lib.AXIS)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _join(x, mesh):
  """The inverse: [count, B / count, …] -> [B, …]."""
  x = x.reshape(len(x), mesh.size, -1, *x.shape[2:]).swapaxes(0, 1)
  x = x.reshape(-1, *x.shape[3:])
  return jax.lax.with_sharding_constraint(x, mesh_lib.rows(mesh))


def _percentiles(text, image, batch, mesh):  # [B, D], [B, D] -> {name: []}
  """Percentiles of the cosines of all positive pairs and of negatives among the first rows."""
  text, image = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
  few = {"text": text, "image": image, "text_id": batch["text_id"], "image_id": batch["image_id"]}
  few = {name: x[:SAMPLE] for name, x in few.items()}
  positive = jnp.sum(text * image, axis=1)  # [B]
  # Gathered first: sorting a sharded array takes a hundred collectives.
  few, positive = jax.lax.with_sharding_constraint((few, positive), mesh_lib.replicated(mesh))
  same = [few[name][:, None] == few[name] for name in ("text_id", "image_id")]
  negative = jnp.where(same[0] | same[1], jnp.nan, few["text"] @ few["image"].T)  # [few, few]
  return {
    f"score/{name}_p{q:02}": value
    for name, scores in (("positive", positive), ("negative", negative))
    for q, value in zip(PERCENTILES, jnp.nanpercentile(scores, jnp.array(PERCENTILES)), strict=True)
  }
