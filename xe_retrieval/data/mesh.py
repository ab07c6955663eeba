"""A device mesh with one axis, `data`, and the shardings used on it."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def make(devices=None) -> Mesh:
  """A mesh of all devices, or of these."""
  devices = devices or jax.devices()
  return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def rows(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays whose first axis is divided among the devices."""
  return NamedSharding(mesh, PartitionSpec(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays that are replicated on every device."""
  return NamedSharding(mesh, PartitionSpec())


def local(tree, mesh: Mesh):
  """Arrays that are replicated over the devices of all processes -> over this process's `mesh`."""
  own = lambda x: x if x.is_fully_addressable else x.addressable_data(0)  # noqa: E731
  return jax.device_put(jax.tree.map(own, tree), replicated(mesh))


def fsdp(mesh: Mesh, tree):
  """A sharding for each array of a tree: along its longest axis that divides evenly (FSDP).

  Small arrays, and those without such an axis, are replicated.
  """

  def choose(x):
    axes = [i for i, n in enumerate(x.shape) if n % mesh.size == 0]
    if x.size < 1024 or not axes:
      return replicated(mesh)
    longest = max(axes, key=lambda i: x.shape[i])
    return NamedSharding(mesh, PartitionSpec(*[None] * longest, AXIS))

  return jax.tree.map(choose, tree)
