"""Collectives over a mesh axis that do nothing on a single device, where `axis` is None."""

import jax
import jax.numpy as jnp
from jax import lax


def gather(tree, axis):  # leaves [n, ...] of this device -> [N, ...] of all
  return tree if axis is None else lax.all_gather(tree, axis, tiled=True)


def scatter(x, axis):  # [N, ...] of each device -> [n, ...], summed over devices
  return x if axis is None else lax.psum_scatter(x, axis, tiled=True)


def own(x, axis):  # [N, ...] -> [n, ...], the rows of this device
  if axis is None:
    return x
  n = len(x) // lax.axis_size(axis)
  return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * n, n)


def total(x, axis):
  return x if axis is None else lax.psum(x, axis)


def largest(x, axis):
  return x if axis is None else lax.pmax(x, axis)


def mean(x, axis):  # [n] -> []
  return total(jnp.sum(x), axis) / total(x.size, axis)


def varying(tree, axis):
  """The same values, typed as differing between devices, as the carry of a loop has to be."""
  return tree if axis is None else jax.tree.map(lambda x: lax.pcast(x, axis, to="varying"), tree)
