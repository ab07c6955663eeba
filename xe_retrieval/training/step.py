"""One training step on the global batch."""

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from xe_retrieval.training import mesh as mesh_lib
from xe_retrieval.training import optimizers

PERCENTILES = (5, 50, 95)
SAMPLE = 64  # rows whose negatives are looked at, for their percentiles


@flax.struct.dataclass
class TrainState:
  """Everything that training changes."""

  step: jax.Array  # int32 []
  params: dict  # {"text": …, "image": …}
  batch_stats: dict  # running statistics of BatchNorm
  opt_state: optax.OptState
  rng: jax.Array  # dropout of step n uses fold_in(rng, n)
  ema: dict = flax.struct.field(default_factory=dict)  # mean of params over steps; {}: not kept


def init(config, variables, optimizer, mesh) -> TrainState:
  """The state before the first step, laid out over the mesh as the config says."""

  def build(variables):
    return TrainState(
      step=jnp.zeros([], jnp.int32),
      params=variables["params"],
      batch_stats=variables.get("batch_stats", {}),
      opt_state=optimizer.init(variables["params"]),
      rng=jax.random.PRNGKey(config.seed),
      ema=variables["params"] if config.ema_decay else {},
    )

  where = shardings(config, jax.eval_shape(build, variables), mesh)
  return jax.jit(build, out_shardings=where)(variables)


def init_variables(config, model):
  """Parameters and BatchNorm statistics drawn from config.seed."""
  tokens = jnp.zeros([1, config.text.tokens], jnp.int32)
  image = jnp.zeros([1, config.image.size, config.image.size, 3], jnp.uint8)
  return jax.jit(model.init)(jax.random.PRNGKey(config.seed), tokens, image)


def shardings(config, state: TrainState, mesh) -> TrainState:
  """Where each array of a state lies: a copy on every device, or a part (config.mesh)."""
  everywhere = mesh_lib.everywhere(mesh)
  if config.mesh.shard_parameters:
    return mesh_lib.spread(mesh, state)
  return jax.tree.map(lambda _: everywhere, state)


def make(config, model, loss, optimizer, mesh):
  """train_step(state, batch) -> state, metrics; the batch's rows are spread over the mesh."""
  micro = config.micro_batch or config.batch_size
  gradients = _whole if micro == config.batch_size else _in_micro_batches
  rates = {tower: optimizers.schedule(config[tower], config.steps) for tower in ("text", "image")}
  everywhere = mesh_lib.everywhere(mesh)

  def embed(params, batch_stats, rng, tokens, image):  # -> ([B, D], [B, D]), batch_stats
    params = jax.lax.with_sharding_constraint(params, everywhere)  # gathered, if they were spread
    variables = {"params": params, "batch_stats": batch_stats}
    embeddings, updated = model.apply(
      variables, tokens, image, train=True, rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    return embeddings, updated.get("batch_stats", batch_stats)  # none if no tower was run

  def train_step(state, batch):
    rng = jax.random.fold_in(state.rng, state.step)
    inputs = (batch["tokens"], batch["image"])
    ids = {"text_id": batch["text_id"], "image_id": batch["image_id"]}
    objective = jax.named_scope("loss")(lambda text, image: loss(text, image, **ids))
    value, grads, embeddings, batch_stats = gradients(
      embed, objective, state, rng, inputs, micro, mesh
    )
    grads = jax.lax.with_sharding_constraint(grads, shardings(config, grads, mesh))
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
    norms = {f"gradient_norm/{tower}": optax.global_norm(grads[tower]) for tower in sorted(grads)}
    metrics = {
      "loss": value,
      **norms,
      **{f"learning_rate/{tower}": rate(state.step) for tower, rate in rates.items()},
      **_percentiles(*embeddings, batch, mesh),
      "finite": jnp.isfinite(value + sum(norms.values()) + optax.global_norm(updates)),
    }
    ema = optax.incremental_update(params, state.ema, 1 - config.ema_decay) if state.ema else {}
    state = state.replace(
      step=state.step + 1, params=params, batch_stats=batch_stats, opt_state=opt_state, ema=ema
    )
    return state, metrics

  return train_step


def _whole(embed, objective, state, rng, inputs, micro, mesh):
  """Loss, its gradients, embeddings and BatchNorm statistics, all activations held at once."""

  def value(params):
    embeddings, batch_stats = embed(params, state.batch_stats, rng, *inputs)
    return objective(*embeddings), (embeddings, batch_stats)

  (value, (embeddings, batch_stats)), grads = jax.value_and_grad(value, has_aux=True)(state.params)
  return value, grads, embeddings, batch_stats


def _in_micro_batches(embed, objective, state, rng, inputs, micro, mesh):
  """The same with the activations of `micro` rows at a time, for one more forward pass.

  Embed without gradient, take the loss's gradient at the embeddings, embed again with it: the same
  rng makes the same dropout. BatchNorm that learns sees the statistics of a micro-batch; its
  running ones move once per step, towards their mean.
  """
  count = len(inputs[0]) // micro
  rngs = jax.random.split(rng, count)
  parts = jax.tree.map(lambda x: _split(x, count, mesh), inputs)  # [count, micro, …]
  embeddings = jax.lax.map(
    lambda part: embed(state.params, state.batch_stats, part[0], *part[1])[0], (rngs, parts)
  )  # [count, micro, D] twice
  embeddings = jax.tree.map(lambda x: _join(x, mesh), embeddings)  # [B, D]
  value, slopes = jax.value_and_grad(objective, argnums=(0, 1))(*embeddings)
  slopes = jax.tree.map(lambda x: _split(x, count, mesh), slopes)

  def add(total, part):
    rng, inputs, slope = part
    again = lambda params: embed(params, state.batch_stats, rng, *inputs)  # noqa: E731
    _, pull, batch_stats = jax.vjp(again, state.params, has_aux=True)
    return jax.tree.map(jnp.add, total, *pull(slope)), batch_stats

  nothing = jax.tree.map(jnp.zeros_like, state.params)
  grads, batch_stats = jax.lax.scan(add, nothing, (rngs, parts, slopes))
  return value, grads, embeddings, jax.tree.map(lambda x: x.mean(0), batch_stats)


def _split(x, count, mesh):
  """[B, …] -> [count, B / count, …], each device keeping its rows: part i is its i-th share."""
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
  """Of the cosines of all pairs, and of the negatives among the first few rows."""
  text, image = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
  few = {"text": text, "image": image, "text_id": batch["text_id"], "image_id": batch["image_id"]}
  few = {name: x[:SAMPLE] for name, x in few.items()}
  positive = jnp.sum(text * image, axis=1)  # [B]
  # Gathered first: sorting what is spread over devices takes a hundred exchanges.
  few, positive = jax.lax.with_sharding_constraint((few, positive), mesh_lib.everywhere(mesh))
  same = [few[name][:, None] == few[name] for name in ("text_id", "image_id")]
  negative = jnp.where(same[0] | same[1], jnp.nan, few["text"] @ few["image"].T)  # [few, few]
  return {
    f"score/{name}_p{q:02}": value
    for name, scores in (("positive", positive), ("negative", negative))
    for q, value in zip(PERCENTILES, jnp.nanpercentile(scores, jnp.array(PERCENTILES)), strict=True)
  }
