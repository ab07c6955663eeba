"""ResNet (He et al. 2015): images -> feature maps, as transformers' ResNetModel and torchvision."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from xe_retrieval.towers.convolution import batch_norm, convolve, max_pool

PATCH = 8  # pixels


class ResNet(nn.Module):
  """A stem and stages of residual blocks; each stage but the first halves the resolution."""

  depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks per stage
  widths: tuple[int, ...] = (256, 512, 1024, 2048)  # channels a stage puts out
  block: str = "bottleneck"  # or "basic"
  stem: str = "imagenet"  # 7x7 stride 2 and max pooling; or "patch": 8x8 stride 8
  stem_width: int = 64
  downsample_in_bottleneck: bool = False  # stride in the 1x1 (v1) or in the 3x3 convolution (v1.5)
  batch_norm: str = "sync"  # or "frozen": running statistics in training too
  frozen: int = 0  # how many of `parts()` stay fixed: no gradient, running statistics
  dtype: jnp.dtype = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, x, train=False):  # [B, H, W, 3] -> [B, h, w, widths[-1]]
    def batch_statistics(part):
      return train and self.batch_norm == "sync" and self.frozen <= part

    x = Stem(self.stem_width, self.stem, self.dtype, name="stem")(
      x.astype(self.dtype), batch_statistics(0)
    )
    if self.frozen == 1:
      x = jax.lax.stop_gradient(x)

    block = {"bottleneck": Bottleneck, "basic": Basic}[self.block]
    block = nn.remat(block, static_argnums=(2,)) if self.remat else block
    names = self.parts()
    part = 0
    for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
      for i in range(depth):
        part += 1
        stride = 2 if i == 0 and stage > 0 else 1
        x = block(width, stride, self.downsample_in_bottleneck, self.dtype, name=names[part])(
          x, batch_statistics(part)
        )
        if self.frozen == part + 1:
          x = jax.lax.stop_gradient(x)
    return x

  def parts(self):
    """Names of the parameter groups from input to output, the unit of freezing."""
    return ["stem"] + [
      f"stage_{stage}_block_{i}" for stage, depth in enumerate(self.depths) for i in range(depth)
    ]

  def feature_width(self):
    return self.widths[-1]


class Stem(nn.Module):
  width: int
  kind: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, batch_statistics):
    if self.kind == "patch":  # patches do not overlap: one matrix product
      b, h, w, c = x.shape
      x = x.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c).swapaxes(2, 3)
      x = x.reshape(b, h // PATCH, w // PATCH, PATCH**2 * c)
    kernel, stride = {"imagenet": (7, 2), "patch": (1, 1)}[self.kind]
    x = Conv(self.width, kernel, stride, self.dtype, name="conv")(x)
    x = nn.relu(BatchNorm(name="norm")(x, batch_statistics))
    if self.kind == "imagenet":
      x = max_pool(x)
    return x


class Bottleneck(nn.Module):
  """1x1 to a quarter of the width, 3x3, 1x1 back, added to the input."""

  width: int
  stride: int
  downsample_first: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, batch_statistics):
    strides = (self.stride, 1) if self.downsample_first else (1, self.stride)
    y = Conv(self.width // 4, 1, strides[0], self.dtype, name="conv_0")(x)
    y = nn.relu(BatchNorm(name="norm_0")(y, batch_statistics))
    y = Conv(self.width // 4, 3, strides[1], self.dtype, name="conv_1")(y)
    y = nn.relu(BatchNorm(name="norm_1")(y, batch_statistics))
    y = Conv(self.width, 1, 1, self.dtype, name="conv_2")(y)
    y = BatchNorm(name="norm_2")(y, batch_statistics)
    return nn.relu(y + _shortcut(self, x, batch_statistics))


class Basic(nn.Module):
  """Two 3x3 convolutions, added to the input."""

  width: int
  stride: int
  downsample_first: bool  # unused: there is no bottleneck
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, batch_statistics):
    y = Conv(self.width, 3, self.stride, self.dtype, name="conv_0")(x)
    y = nn.relu(BatchNorm(name="norm_0")(y, batch_statistics))
    y = Conv(self.width, 3, 1, self.dtype, name="conv_1")(y)
    y = BatchNorm(name="norm_1")(y, batch_statistics)
    return nn.relu(y + _shortcut(self, x, batch_statistics))


def _shortcut(block, x, batch_statistics):
  """The input itself, or projected where the block changes its shape."""
  if block.stride == 1 and x.shape[-1] == block.width:
    return x
  x = Conv(block.width, 1, block.stride, block.dtype, name="shortcut_conv")(x)
  return BatchNorm(name="shortcut_norm")(x, batch_statistics)


class Conv(nn.Module):
  """Square convolution without bias."""

  features: int
  size: int
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):  # [B, H, W, C] -> [B, H / stride, W / stride, features]
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    kernel = self.param("kernel", init, (self.size, self.size, x.shape[-1], self.features))
    return convolve(x, kernel.astype(self.dtype), self.stride)


class BatchNorm(nn.Module):
  """Normalises by the statistics of the batch (under jit, the global batch) or by running ones."""

  momentum: float = 0.9
  eps: float = 1e-5

  @nn.compact
  def __call__(self, x, batch_statistics):  # [B, H, W, C] -> [B, H, W, C]
    channels = x.shape[-1:]
    scale = self.param("scale", nn.initializers.ones, channels)
    bias = self.param("bias", nn.initializers.zeros, channels)
    running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
    running_var = self.variable("batch_stats", "var", jnp.ones, channels)
    if not batch_statistics:
      factor = scale * jax.lax.rsqrt(running_var.value + self.eps)
      return (x * factor + (bias - running_mean.value * factor)).astype(x.dtype)

    y, mean, var = batch_norm(x, scale, bias, self.eps)
    if not self.is_initializing():
      count = x.size // x.shape[-1]
      keep = self.momentum
      unbiased = var * (count / max(count - 1, 1))
      running_mean.value = keep * running_mean.value + (1 - keep) * mean
      running_var.value = keep * running_var.value + (1 - keep) * unbiased
    return y
