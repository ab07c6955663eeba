"""Chips and topologies: published peaks with their sources, links and hops of a torus."""

import dataclasses
import math
import re

from xe_retrieval.training.utilization import PEAKS

# Latency of one hop over a link: "How to Scale Your Model", jax-ml.github.io/scaling-book.
HOP_SECONDS = 1e-6
_DOCS = "cloud.google.com/tpu/docs/"


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peaks of one chip."""

  name: str
  flops: float  # per second, bfloat16
  memory: float  # bytes of HBM
  bandwidth: float  # of HBM, bytes per second
  link: float  # bytes per second over one link in one direction
  clock: float  # Hz: flops / (2 × multipliers of the matrix units)
  wraps: int  # an axis is a ring if its length is a multiple of this
  axes: int  # of the torus
  source: str


CHIPS = {
  chip.name: chip
  for chip in (
    # 6 links of 50 GB/s: Jouppi et al. 2023, arXiv:2304.01433; 2 × 4 units of 128 × 128.
    Chip("v4", PEAKS["TPU v4"], 32 * 2**30, 1200e9, 50e9, 1.05e9, 4, 3, _DOCS + "v4"),
    # 400 GB/s over 4 ports, both directions together; 4 units of 128 × 128.
    Chip("v5e", PEAKS["TPU v5 lite"], 16 * 2**30, 819e9, 50e9, 1.5e9, 16, 2, _DOCS + "v5e"),
    # 4,800 Gbit/s over 6 ports; 2 × 4 units of 128 × 128.
    Chip("v5p", PEAKS["TPU v5p"], 95 * 2**30, 2765e9, 100e9, 1.75e9, 4, 3, _DOCS + "v5p"),
    # 800 GB/s over 4 ports, both directions together.
    Chip("v6e", PEAKS["TPU v6 lite"], 32 * 2**30, 1638e9, 100e9, 1.75e9, 16, 2, _DOCS + "v6e"),
    # Round numbers, so that a plan can be printed without a TPU compiler.
    Chip("cpu", 1e11, 16 * 2**30, 1e10, 1e9, 1e9, 1, 1, "round numbers of no real machine"),
  )
}

# Topologies that libtpu 0.0.42 knows. The step was compiled for v5e 2x2, 2x4, 4x8, 8x8 and 16x16,
# the loss alone also for v4 2x2x1, v5p 4x4x4 and v6e 4x4. Others may work too.
KNOWN = (
  *("v4:2x2x1", "v4:2x2x2", "v4:4x4x4", "v4:4x4x8", "v4:8x8x8"),
  *("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16"),
  *("v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x4", "v5p:4x4x8", "v5p:8x8x8"),
  *("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16"),
)


@dataclasses.dataclass(frozen=True)
class Topology:
  chip: Chip
  shape: tuple[int, ...]  # chips along each axis

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def name(self) -> str:
    return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

  @property
  def links(self) -> int:
    """Links of the chip that has the fewest: one in a corner, where axes are not rings."""
    return max(sum((2 if self._ring(n) else 1) for n in self.shape if n > 1), 1)

  @property
  def hops(self) -> int:
    """Hops between the two chips that are farthest apart."""
    return sum(n // 2 if self._ring(n) else n - 1 for n in self.shape)

  def _ring(self, n):
    if self.chip.axes == 3 and any(m % self.chip.wraps for m in self.shape):
      return False  # only whole cubes have wraparound links
    return n > 2 and n % self.chip.wraps == 0


def topology(name: str) -> Topology:
  """Parses v5e:16x16 or cpu:8."""
  found = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
  if not found or found[1] not in CHIPS:
    raise ValueError(f"topology {name!r} is not one of: {names()}")
  shape = tuple(int(n) for n in found[2].split("x"))
  if 0 in shape:
    raise ValueError(f"topology {name!r} has no chips; it is one of: {names()}")
  return Topology(CHIPS[found[1]], shape)


def names() -> str:
  """The known topologies, for messages."""
  return ", ".join(KNOWN) + ", or cpu:N"
