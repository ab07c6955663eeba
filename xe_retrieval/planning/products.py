"""Multiplications in the matrix products and convolutions of a compiled program."""

import functools
import math
import re

import numpy as np


def multiplications(instruction, left, right) -> int:
  """In a dot or convolution with operands of these shapes."""
  count = _dot if instruction.opcode == "dot" else _convolution
  return count(instruction, left, right)


def passes(instruction, left, right):
  """bfloat16 products per product: float32 operands are split into up to three bfloat16 terms."""
  found = re.search(r"operand_precision=\{(\w+)", instruction.rest)
  terms = {"high": 2, "highest": 3}.get(found[1] if found else "default", 1)
  split = [terms if shape.dtype == "f32" else 1 for shape in (left, right)]
  both = split[0] * split[1]
  return {4: 3, 9: 6}.get(both, both)  # products of the smallest terms are dropped


def _dot(instruction, left, right):
  axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)[1]
  summed = math.prod(left.dims[int(axis)] for axis in axes.split(",") if axis)
  return instruction.shapes[0].elements * summed


def _convolution(instruction, left, right):
  """Without multiplications by padding or by the zeros of a dilation."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
  ins, kernels, outs = labels.groups()
  output = instruction.shapes[0].dims
  groups = {
    name: int(found[1])
    if (found := re.search(rf"{name}_group_count=(\d+)", instruction.rest))
    else 1
    for name in ("feature", "batch")
  }
  window = re.search(r"window=\{([^}]*)\}", instruction.rest)
  window = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
  total = left.dims[ins.index("b")] // groups["batch"]
  total *= left.dims[ins.index("f")] // groups["feature"] * output[outs.index("f")]
  for axis in range(len(ins) - 2):
    get = lambda name, default, a=axis: (window.get(name) or "x".join([default] * 9)).split("x")[a]  # noqa: E731
    total *= _positions(
      left.dims[ins.index(str(axis))],
      right.dims[kernels.index(str(axis))],
      output[outs.index(str(axis))],
      int(get("stride", "1")),
      int(get("pad", "0_0").split("_")[0]),
      int(get("lhs_dilate", "1")),
      int(get("rhs_dilate", "1")),
    )
  return total


@functools.cache
def _positions(size, kernel, output, stride, pad, lhs_dilation, rhs_dilation):
  """Along one axis: pairs of an output and a kernel position that fall on an input element."""
  at = np.arange(output)[:, None] * stride + np.arange(kernel) * rhs_dilation - pad
  inside = (at >= 0) & (at <= (size - 1) * lhs_dilation)
  return int(np.sum(inside & (at % lhs_dilation == 0)))
