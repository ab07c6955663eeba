"""Model FLOPs utilisation (MFU): the share of the devices' peak that training uses."""

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s per device as published by the makers, by the start of jax's device_kind.
PEAKS = {
  "TPU v2": 22.5e12,  # per core, which is what jax calls a device up to v3
  "TPU v3": 61.5e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA B200": 2250e12,
}


def peak(device_kind: str) -> float | None:
  """FLOP/s of one device, or None if it is not in the table."""
  known = [name for name in PEAKS if device_kind.startswith(name)]
  return PEAKS[max(known, key=len)] if known else None


def step_flops(built) -> float:
  """FLOPs of both towers, forward and backward, on a global batch.

  These are model FLOPs: recomputation (remat, micro_batch) and the loss are not counted.
  """

  def total(params, batch_stats, inputs):
    (text, image), _ = built.model.clone(
      text=_without_remat(built.model.text), image=_without_remat(built.model.image)
    ).apply(
      {"params": params, "batch_stats": batch_stats},
      **inputs,
      train=True,
      rngs={"dropout": jax.random.PRNGKey(0)},
      mutable=["batch_stats"],
    )
    return jnp.sum(text) + jnp.sum(image)

  unsharded = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
  state, batch = unsharded(built.state), unsharded(built.batch)
  inputs = {name: x for name, x in batch.items() if not name.endswith("_id")}
  lowered = jax.jit(jax.grad(total)).lower(*state.variables().values(), inputs)
  return float(lowered.cost_analysis()["flops"])


def peak_seconds(built, mesh) -> float | None:
  """Seconds a step would take at the devices' peak: MFU is this times steps per second.

  None if the peak is not known.
  """
  known = peak(mesh.devices.flat[0].device_kind)
  return step_flops(built) / (known * mesh.size) if known else None


def _without_remat(encoder):
  return encoder.clone(tower=encoder.tower.clone(remat=False))
