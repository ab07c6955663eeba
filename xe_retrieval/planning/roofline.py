"""Roofline: a lower bound on the time of a step from its costs and the chip's peaks."""

import dataclasses

from xe_retrieval.planning import chips

LEFT_OUT = (
  "An upper bound. Left out: vector operations (normalisation, softmax, dropout), matrices that do "
  "not fill the matrix unit, latency between operations, input, checkpoints, validation. "
  "Compute, memory and interconnect are assumed to overlap fully."
)


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds that each resource takes at its peak."""

  compute: float
  memory: float
  interconnect: float
  scheduled: float  # the compiler's estimate without interconnect; 0 if it gives none

  @property
  def bound(self) -> float:
    return max(self.compute, self.memory, self.interconnect)

  @property
  def binding(self) -> str:
    return max(("compute", "memory", "interconnect"), key=lambda name: getattr(self, name))

  @property
  def estimate(self) -> float:
    """A guess rather than a bound: the compiler's schedule, then the interconnect."""
    return max(self.scheduled, self.compute, self.memory) + self.interconnect


def times(cost, topology: chips.Topology) -> Times:
  chip = topology.chip
  work = cost.flops if chip.name == "cpu" else cost.passes
  wire = sum(
    count * collective_seconds(kind, size, group, topology)
    for (kind, size, group), count in cost.collectives.items()
  )
  return Times(work / chip.flops, cost.bytes / chip.bandwidth, wire, cost.cycles / chip.clock)


def collective_seconds(kind, size, group, topology) -> float:
  """Bandwidth or latency of a collective, whichever is longer."""
  if group == 1:
    return 0.0
  rounds = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
  sent = size if kind == "collective-permute" else size * (group - 1) / group
  links = 1 if kind == "collective-permute" else topology.links
  hops = 1 if kind == "collective-permute" else topology.hops
  return rounds * max(sent / (links * topology.chip.link), hops * chips.HOP_SECONDS)
