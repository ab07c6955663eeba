"""How much of the devices' peak a step uses (MFU), where the peak is known."""

import jax
import jax.numpy as jnp

# bfloat16 peak per device as the makers state it (dense), by the start of jax's device_kind.
PEAKS = {
  "TPU v2": 22.5e12,  # per core, as jax counts devices up to v3
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
  """FLOP/s of one device, or None."""
  known = [name for name in PEAKS if device_kind.startswith(name)]
  return PEAKS[max(known, key=len)] if known else None


def of_step(built) -> float:
  """FLOPs of both towers, forward and backward, on a whole batch: what must be computed.

  Not what is: recomputation (remat, micro_batch) and the loss do not count.
  """

  def total(params, batch_stats, tokens, image):
    (text, image), _ = built.model.clone(
      text=_plain(built.model.text), image=_plain(built.model.image)
    ).apply(
      {"params": params, "batch_stats": batch_stats},
      tokens,
      image,
      train=True,
      rngs={"dropout": jax.random.PRNGKey(0)},
      mutable=["batch_stats"],
    )
    return jnp.sum(text) + jnp.sum(image)

  bare = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
  state, batch = bare(built.state), bare(built.batch)
  lowered = jax.jit(jax.grad(total)).lower(
    state.params, state.batch_stats, batch["tokens"], batch["image"]
  )
  return float(lowered.cost_analysis()["flops"])


def per_second_of_peak(built, mesh) -> float | None:
  """of_step / peak of all devices: times steps per second it is the MFU. None: peak unknown."""
  known = peak(mesh.devices.flat[0].device_kind)
  return of_step(built) / (known * mesh.size) if known else None


def _plain(encoder):
  return encoder.clone(tower=encoder.tower.clone(remat=False))
