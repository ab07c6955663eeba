"""One optimiser per tower, its projection included, and one for what the loss learns.

Frozen parameters have none.
"""

import jax
import optax

from xe_retrieval.towers import dual_encoder

OPTIMIZERS = ("adamw", "sgd")


def make(config, params) -> optax.GradientTransformation:
  """`optax.multi_transform` over the labels text, image, loss and frozen."""
  optimizers = {
    "text": of(config.text, config.steps),
    "image": of(config.image, config.steps),
    "frozen": optax.set_to_zero(),
  }
  if "loss" in params:
    optimizers["loss"] = optax.adam(schedule(config.text, config.steps))
  return clipped(config, optax.multi_transform(optimizers, labels(config, params)))


def clipped(config, optimizer):
  """The optimiser of gradients that are clipped at config.clip_norm."""
  if not config.clip_norm:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def labels(config, params):
  """-> a tree like `params`: each leaf "text", "image", "loss" or "frozen"."""
  if unknown := set(params) - {"text", "image", "loss"}:
    raise ValueError(f"no optimiser covers the parameters under {sorted(unknown)}")
  towers = {name: group for name, group in params.items() if name != "loss"}
  frozen = dual_encoder.frozen(towers, config)
  frozen |= {"loss": jax.tree.map(lambda _: False, params["loss"])} if "loss" in params else {}
  return {
    group: jax.tree.map(lambda fixed, g=group: "frozen" if fixed else g, frozen[group])
    for group in params
  }


def schedule(tower, steps: int) -> optax.Schedule:
  """Linear from 0 to `learning_rate` while warming up, then linear to `end_learning_rate`."""
  decay = optax.linear_schedule(
    tower.learning_rate, tower.end_learning_rate, max(steps - tower.warmup_steps, 1)
  )
  warmup = optax.linear_schedule(0.0, tower.learning_rate, max(tower.warmup_steps, 1))
  return optax.join_schedules([warmup, decay], [tower.warmup_steps])


def of(tower, steps: int) -> optax.GradientTransformation:
  """The optimiser that the fields of config.text, config.image or config.joint describe."""
  rate = schedule(tower, steps)
  kernels = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
  if tower.optimizer == "adamw":
    return optax.adamw(rate, weight_decay=tower.weight_decay, mask=kernels)
  return optax.chain(
    optax.add_decayed_weights(tower.weight_decay, mask=kernels), optax.sgd(rate, momentum=0.9)
  )
