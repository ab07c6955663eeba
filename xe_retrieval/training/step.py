"""One training step on the global batch."""

import flax
import jax
import jax.numpy as jnp
import optax

from xe_retrieval.training import mesh as mesh_lib


@flax.struct.dataclass
class TrainState:
  """Everything that training changes."""

  step: jax.Array  # int32 []
  params: dict  # {"text": …, "image": …}
  batch_stats: dict  # running statistics of BatchNorm
  opt_state: optax.OptState
  rng: jax.Array  # dropout of step n uses fold_in(rng, n)


def init(config, variables, optimizer, mesh) -> TrainState:
  """The state before the first step, one copy per device."""

  def build(variables):
    return TrainState(
      step=jnp.zeros([], jnp.int32),
      params=variables["params"],
      batch_stats=variables.get("batch_stats", {}),
      opt_state=optimizer.init(variables["params"]),
      rng=jax.random.PRNGKey(config.seed),
    )

  return jax.jit(build, out_shardings=mesh_lib.everywhere(mesh))(variables)


def init_variables(config, model):
  """Parameters and BatchNorm statistics drawn from config.seed."""
  tokens = jnp.zeros([1, config.text.tokens], jnp.int32)
  image = jnp.zeros([1, config.image.size, config.image.size, 3], jnp.uint8)
  return jax.jit(model.init)(jax.random.PRNGKey(config.seed), tokens, image)


def make(model, loss, optimizer, mesh):
  """train_step(state, batch) -> state, metrics; the batch's rows are spread over the mesh."""

  def train_step(state, batch):
    rngs = {"dropout": jax.random.fold_in(state.rng, state.step)}

    def objective(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      (text, image), updated = model.apply(
        variables, batch["tokens"], batch["image"], train=True, rngs=rngs, mutable=["batch_stats"]
      )  # [B, D], [B, D]
      value = loss(text, image, text_id=batch["text_id"], image_id=batch["image_id"])
      return value, updated.get("batch_stats", state.batch_stats)  # none if no tower was run

    (value, batch_stats), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {
      "loss": value,
      "gradient_norm/text": optax.global_norm(grads["text"]),
      "gradient_norm/image": optax.global_norm(grads["image"]),
    }
    params = optax.apply_updates(state.params, updates)
    state = state.replace(
      step=state.step + 1, params=params, batch_stats=batch_stats, opt_state=opt_state
    )
    return state, metrics

  everywhere, rows = mesh_lib.everywhere(mesh), mesh_lib.rows(mesh)
  return jax.jit(
    train_step,
    in_shardings=(everywhere, rows),
    out_shardings=everywhere,
    donate_argnums=0,
  )
