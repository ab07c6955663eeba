"""How fast a counted step can be at most: published peaks against what has to be done."""

import dataclasses

from xe_retrieval.planning import chips

LEFT_OUT = (
  "An upper bound. Left out: work on vectors (normalisation, softmax, dropout), matrices that do "
  "not fill the matrix unit, waiting between operations, input, checkpoints, validation. "
  "Computing, memory and interconnect are taken to overlap fully."
)


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds that each resource needs at its peak."""

  compute: float
  memory: float
  interconnect: float
  scheduled: float  # what the compiler estimates for its own schedule, without interconnect; or 0

  @property
  def bound(self) -> float:
    return max(self.compute, self.memory, self.interconnect)

  @property
  def binding(self) -> str:
    return max(("compute", "memory", "interconnect"), key=lambda name: getattr(self, name))

  @property
  def estimate(self) -> float:
    """Less of a bound and more of a guess: the compiler's schedule, then the interconnect."""
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
  """Bytes through the links of a chip, or the way to the farthest chip if that takes longer."""
  if group == 1:
    return 0.0
  rounds = 2 if kind == "all-reduce" else 1  # it is a reduce-scatter and an all-gather
  through = size if kind == "collective-permute" else size * (group - 1) / group
  links = 1 if kind == "collective-permute" else topology.links
  hops = 1 if kind == "collective-permute" else topology.hops
  return rounds * max(through / (links * topology.chip.link), hops * chips.HOP_SECONDS)
