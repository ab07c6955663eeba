"""Convolution, pooling and normalisation of [B, H, W, C], with gradients that are fast on a CPU.

`plain` is the convolution itself; `convolve` has the same values and gradients and is faster on a
CPU (python -m benchmarks.towers): in inference by Winograd's algorithm; in training because XLA's
own gradients copy activations into layouts of large strides, which doubles the time of a step of
ResNet-50. On other platforms `convolve` is `plain`, gradients included.
"""

import functools

import jax
import jax.numpy as jnp

from xe_retrieval.towers import winograd


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x, kernel, stride):
  """[B, H, W, C], [k, k, C, D] -> [B, H / stride, W / stride, D], k odd, padded by zeros."""
  # Runs in inference only: where a gradient is taken, JAX calls _convolve_forward instead.
  if stride == 1 and winograd.suits(x, kernel):
    default = functools.partial(plain, stride=1)
    return jax.lax.platform_dependent(x, kernel, cpu=winograd.convolve, default=default)
  return plain(x, kernel, stride)


def plain(x, kernel, stride):
  """As convolve, by XLA; a 1x1 kernel as a matrix product."""
  if kernel.shape[0] == 1:
    return x[:, ::stride, ::stride] @ kernel[0, 0]
  pad = (kernel.shape[0] // 2,) * 2
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


def max_pool(x):  # [B, H, W, C] -> [B, ⌈H / 2⌉, ⌈W / 2⌉, C]
  """Maximum over 3x3 windows, stride 2, padding 1, one axis after the other."""
  return _max_pool_axis(_max_pool_axis(x, 2), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def batch_norm(x, scale, bias, eps):
  """(x normalised by the statistics of its batch, mean [C], variance [C]), in float32 inside."""
  return _batch_norm(x, scale, bias, eps)[0]


def _convolve_forward(x, kernel, stride):
  return plain(x, kernel, stride), (x, kernel)


def _convolve_gradients(stride, saved, dy):
  x, kernel = saved

  def on_cpu(x, kernel, dy):
    # Materialised once: fused, it would be computed for both gradients, once with large strides.
    dy = jax.lax.optimization_barrier(dy)
    (dx,) = jax.vjp(lambda x: plain(x, kernel, stride), x)[1](dy)
    gradient = _matrix_gradient if kernel.shape[0] == 1 else _window_gradient
    return dx, gradient(x, dy, kernel.shape[0], stride)

  def elsewhere(x, kernel, dy):
    return jax.vjp(lambda x, kernel: plain(x, kernel, stride), x, kernel)[1](dy)

  return jax.lax.platform_dependent(x, kernel, dy, cpu=on_cpu, default=elsewhere)


def _matrix_gradient(x, dy, size, stride):
  """Gradient of a 1x1 kernel: a product of two tall matrices that transposes the narrower one."""
  x = x[:, ::stride, ::stride].reshape(-1, x.shape[-1])  # [BHW, C]
  dy = dy.reshape(-1, dy.shape[-1])  # [BHW, D]
  if x.shape[1] <= dy.shape[1]:
    return (x.T @ dy)[None, None]
  return jax.lax.optimization_barrier(dy.T @ x).T[None, None]


def _window_gradient(x, dy, size, stride):
  """Gradient of a kxk kernel: a convolution along H whose channels are the pairs (B, W).

  Its windows are contiguous in memory. The k offsets along W are stacked with the channels of x.
  """
  batch, height, width, channels = x.shape
  _, out_height, out_width, features = dy.shape
  pad, span = size // 2, stride * (out_width - 1) + 1
  x = jax.lax.optimization_barrier(x.transpose(3, 1, 0, 2))  # [C, H, B, W]
  x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (pad, pad)))
  x = jnp.stack([x[..., j : j + span : stride] for j in range(size)])  # [k, C, H, B, w]
  x = x.reshape(size * channels, height, batch * out_width)
  dy = dy.transpose(1, 0, 2, 3).reshape(out_height, batch * out_width, features)
  x, dy = jax.lax.optimization_barrier((x, dy))
  kernel = jax.lax.conv_general_dilated(
    x,
    dy,
    (1,),
    ((pad, stride * (out_height - 1) + size - height - pad),),
    rhs_dilation=(stride,),
    dimension_numbers=("NWC", "WIO", "NWC"),
  )  # [k C, k, D]
  return kernel.reshape(size, channels, size, features).transpose(2, 0, 1, 3)


convolve.defvjp(_convolve_forward, _convolve_gradients)


def _max_pool_axis(x, axis):
  """Maximum of each even element, the odd one after it and the odd one before it."""

  def pad(x, before, after):
    padding = [(0, 0)] * x.ndim
    padding[axis] = (before, after)
    return jnp.pad(x, padding, constant_values=-jnp.inf)

  x = pad(x, 0, x.shape[axis] % 2)
  x = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
  even, odd = (jax.lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in (0, 1))
  previous = pad(jax.lax.slice_in_dim(odd, 0, odd.shape[axis] - 1, axis=axis), 1, 0)
  return jnp.maximum(jnp.maximum(even, odd), previous)


def _batch_norm(x, scale, bias, eps):
  x32 = x.astype(jnp.float32)
  mean = x32.mean((0, 1, 2))
  var = jnp.maximum(jnp.square(x32).mean((0, 1, 2)) - jnp.square(mean), 0)
  inverse = jax.lax.rsqrt(var + eps)
  y = x32 * (scale * inverse) + (bias - mean * scale * inverse)
  return (y.astype(x.dtype), mean, var), (x, scale, mean, inverse)


def _batch_norm_gradients(eps, saved, gradients):
  """Written out to keep only x for the backward pass; mean and variance pass on no gradient."""
  x, scale, mean, inverse = saved
  dy = gradients[0].astype(jnp.float32)
  x32 = x.astype(jnp.float32)
  dbias = dy.sum((0, 1, 2))
  dscale = inverse * ((dy * x32).sum((0, 1, 2)) - mean * dbias)
  count = x.size // x.shape[-1]
  slope = inverse * dscale / count
  dx = scale * inverse * (dy - (x32 * slope + (dbias / count - mean * slope)))
  return dx.astype(x.dtype), dscale, dbias


batch_norm.defvjp(_batch_norm, _batch_norm_gradients)
