"""One optimiser per tower, its projection included; none for frozen parameters."""

import jax
import optax

from xe_retrieval.towers import dual_encoder

OPTIMIZERS = ("adamw", "sgd")


def make(config, params) -> optax.GradientTransformation:
  """`optax.multi_transform` over the labels text, image and frozen."""
  towers = optax.multi_transform(
    {
      "text": _tower(config.text, config.steps),
      "image": _tower(config.image, config.steps),
      "frozen": optax.set_to_zero(),
    },
    labels(config, params),
  )
  if not config.clip_norm:
    return towers
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), towers)


def labels(config, params):
  """-> a tree like `params` with leaves "text", "image" or "frozen"; every parameter has one."""
  if unknown := set(params) - {"text", "image"}:
    raise ValueError(f"no optimiser covers the parameters under {sorted(unknown)}")
  frozen = dual_encoder.frozen(params, config)
  return {
    tower: jax.tree.map(lambda fixed, t=tower: "frozen" if fixed else t, frozen[tower])
    for tower in params
  }


def schedule(tower, steps: int) -> optax.Schedule:
  """Linear from 0 to `learning_rate` while warming up, then linear to `end_learning_rate`."""
  decay = optax.linear_schedule(
    tower.learning_rate, tower.end_learning_rate, max(steps - tower.warmup_steps, 1)
  )
  warmup = optax.linear_schedule(0.0, tower.learning_rate, max(tower.warmup_steps, 1))
  return optax.join_schedules([warmup, decay], [tower.warmup_steps])


def _tower(tower, steps):
  rate = schedule(tower, steps)
  kernels = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
  if tower.optimizer == "adamw":
    return optax.adamw(rate, weight_decay=tower.weight_decay, mask=kernels)
  return optax.chain(
    optax.add_decayed_weights(tower.weight_decay, mask=kernels), optax.sgd(rate, momentum=0.9)
  )
