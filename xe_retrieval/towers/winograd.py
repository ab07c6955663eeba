"""3x3 convolution of [B, H, W, C] in a quarter of the products (Winograd; Lavin and Gray 2015).

Along one axis, four outputs of a kernel of three take six products instead of twelve: those of two
polynomials at six points. Along both axes it is 36 instead of 144, and the 36 are matrix products
over all tiles. For inference on a CPU; see convolution.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

_TILE = 4  # outputs along an axis, from _TILE + 2 inputs


def suits(x, kernel):
  """Whether this is faster than XLA's convolution of stride 1 on a CPU, as measured."""
  if x.dtype != jnp.float32 or kernel.dtype != jnp.float32 or kernel.shape[:2] != (3, 3):
    return False
  batch, height, width, _ = x.shape
  if not isinstance(batch, int):  # symbolic, in jax.export: it may be a single image
    return False
  tiles = batch * _tiles(height) * _tiles(width)
  many = tiles >= 32  # else transforming the kernel takes longer than it saves
  wide = min(kernel.shape[2:]) >= 32  # else transforming the tiles does
  filled = 8 * tiles <= batch * height * width  # at least half of the outputs are used
  return many and wide and filled


@jax.jit
def convolve(x, kernel):
  """[B, H, W, C], [3, 3, C, D] -> [B, H, W, D], stride 1, padded by zeros."""
  batch, height, width, channels = x.shape
  rows, columns = _tiles(height), _tiles(width)
  inputs, kernels, outputs = _matrices()
  points = len(inputs)

  kernel = np.kron(kernels, kernels) @ kernel.reshape(9, -1)  # [36, C D]
  x = jnp.pad(x, ((0, 0), (1, _TILE * rows + 1 - height), (1, _TILE * columns + 1 - width), (0, 0)))
  x = _combine(inputs, x, columns)  # [6, B, 4 rows + 2, columns, C]
  x = _combine(inputs, x, rows)  # [6, 6, B, rows, columns, C]
  x = x.reshape(points**2, -1, channels)
  y = x @ kernel.reshape(points**2, channels, -1)  # [36, B rows columns, D]
  y = np.kron(outputs, outputs) @ y.reshape(points**2, -1)  # [16, B rows columns D]
  y = y.reshape(_TILE, _TILE, batch, rows, columns, -1).transpose(2, 3, 0, 4, 1, 5)
  return y.reshape(batch, _TILE * rows, _TILE * columns, -1)[:, :height, :width]


def _tiles(length):
  return -(-length // _TILE)


def _combine(matrix, x, tiles):
  """[., ., 4 tiles + 2, ...] -> [6, ., ., tiles, ...]: matrix @ the six inputs of each tile."""
  x = jax.lax.optimization_barrier(x)  # else XLA fuses it and recomputes it for every use
  parts = [x[:, :, i : i + _TILE * (tiles - 1) + 1 : _TILE] for i in range(len(matrix))]
  return jnp.stack(
    [sum(c * part for c, part in zip(row, parts, strict=True) if c) for row in matrix]
  )


@functools.cache
def _matrices():
  """float32 [6, 6] for six inputs, [6, 3] for the kernel and [4, 6] to four outputs.

  The sixth point is infinity. With ±3/4 and ±3/2 the largest rounding errors are a quarter of those
  with the usual ±1 and ±2, and the coefficients of inputs and outputs are exact.
  """
  points = np.array([0, 3 / 4, -3 / 4, 3 / 2, -3 / 2])
  powers = points[:, None] ** np.arange(_TILE)  # [5, 4]
  others = [np.delete(points, i) for i in range(len(points))]
  inputs = [[*np.poly(rest)[::-1], 0] for rest in others] + [np.poly(points)[::-1]]
  scale = [np.prod(point - rest) for point, rest in zip(points, others, strict=True)]
  kernels = np.vstack([powers[:, :3] / np.array(scale)[:, None], [0, 0, 1]])
  outputs = np.vstack([powers, [0, 0, 0, 1]]).T
  return tuple(np.array(matrix, np.float32) for matrix in (inputs, kernels, outputs))
