"""The devices as one axis named `data`, and what lies where on them."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def make(devices=None) -> Mesh:
  """All devices (or these) in a row."""
  devices = devices or jax.devices()
  return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def rows(mesh: Mesh) -> NamedSharding:
  """Arrays whose first axis is spread over the devices."""
  return NamedSharding(mesh, PartitionSpec(AXIS))


def everywhere(mesh: Mesh) -> NamedSharding:
  """Arrays of which every device holds a copy."""
  return NamedSharding(mesh, PartitionSpec())


def spread(mesh: Mesh, tree):
  """A sharding for each array of a tree: its longest axis that divides over the devices (FSDP).

  What is small, or divides nowhere, has a copy on every device.
  """

  def choose(x):
    axes = [i for i, n in enumerate(x.shape) if n % mesh.size == 0]
    if x.size < 1024 or not axes:
      return everywhere(mesh)
    longest = max(axes, key=lambda i: x.shape[i])
    return NamedSharding(mesh, PartitionSpec(*[None] * longest, AXIS))

  return jax.tree.map(choose, tree)
