"""The devices as one axis named `data`."""

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
