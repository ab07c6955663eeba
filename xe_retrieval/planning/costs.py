"""FLOPs, bytes and collectives of one chip in a compiled step, summed over its HLO by part.

XLA's own cost analysis counts the body of a loop once, on-chip memory as if it were HBM, and a
float32 product at full precision as one pass through the matrix unit. Here loop bodies are
multiplied by their trip counts, bytes are those in HBM with padding, and passes are counted.
"""

import collections
import dataclasses
import math
import re

from xe_retrieval.planning import hlo, products

PARTS = ("text tower", "image tower", "loss", "optimiser", "other")

# Trip counts of loops that depend on the scores, by named scope: measured by
# python -m benchmarks.plan --only=mining and rounded up.
MEASURED_TRIPS = {
  "passes": 2,
  "halvings_together": 8,
  "halvings_apart": 8,
  "halvings_of_rows": 16,
}

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_FREE = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
  *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}


@dataclasses.dataclass
class Cost:
  """Work of one chip in one step."""

  flops: float = 0.0  # of matrix products and convolutions
  passes: float = 0.0  # FLOPs of the matrix unit: flops × bfloat16 passes per product
  bytes: float = 0.0  # read from and written to HBM
  cycles: float = 0.0  # the compiler's estimate without transfers; 0 if it gives none
  # (kind, bytes, chips in a group) -> count
  collectives: dict = dataclasses.field(default_factory=collections.Counter)
  calls: dict = dataclasses.field(default_factory=collections.Counter)  # kind -> count

  def add(self, other, times=1):
    for name in ("flops", "passes", "bytes", "cycles"):
      setattr(self, name, getattr(self, name) + times * getattr(other, name))
    for name in ("collectives", "calls"):
      for key, count in getattr(other, name).items():
        getattr(self, name)[key] += times * count


@dataclasses.dataclass
class Count:
  parts: dict[str, Cost]
  assumed: dict[str, int]  # loops whose trip count is taken from MEASURED_TRIPS
  unknown: int  # loops of unknown trip count, counted once

  @property
  def total(self) -> Cost:
    total = Cost()
    for cost in self.parts.values():
      total.add(cost)
    return total


def count(text: str) -> Count:
  """`text` is the HLO of a compiled program, as .as_text() prints it."""
  compiled = hlo.parse(text)
  counter = _Counter(compiled)
  counter.walk(compiled.computations[compiled.entry], 1, "other")
  return Count(counter.parts, counter.assumed, counter.unknown)


def part(scope: str) -> str | None:
  """Scope such as jit(train_step)/jvp(DualEncoder)/text/… -> one of PARTS; None if empty."""
  names = re.findall(r"[\w.]+", scope)
  for name in names:
    if name == "loss":
      return "loss"
    if name == "optimizer":
      return "optimiser"
    if name in ("text", "DualEncoder.embed_text"):
      return "text tower"
    if name in ("image", "DualEncoder.embed_image"):
      return "image tower"
  return "other" if names else None


class _Counter:
  def __init__(self, compiled):
    self.program = compiled
    self.parts = {name: Cost() for name in PARTS}
    self.assumed, self.unknown = {}, 0
    self._owners = {}  # id of an instruction -> part
    self._chains = set()  # collectives counted already, by chain

  def walk(self, computation, times, inherited):
    """Adds the cost of running a computation `times` times."""
    for instruction in computation.instructions.values():
      opcode = instruction.opcode
      owner = self._part(instruction, computation) or inherited
      self._owners[id(instruction)] = owner
      if opcode == "while":
        trips = self._trips(instruction, computation)
        for name in instruction.called("body", "condition"):
          self.walk(self.program.computations[name], times * trips, owner)
      elif opcode in ("call", "async-start", "conditional"):
        branches = instruction.called("to_apply", "calls", "true_computation", "false_computation")
        if listed := re.search(r"branch_computations=\{([^}]*)\}", instruction.rest):
          branches += re.findall(r"%([\w.\-]+)", listed[1])
        for name in branches[-1:]:  # the last branch of a conditional
          self.walk(self.program.computations[name], times, owner)
      elif kind := _collective(opcode):
        self._communicate(kind, instruction, computation, times, owner)
      elif opcode not in _FREE and not opcode.endswith(("-done", "-update")):
        self._compute(instruction, computation, times, owner)

  def _compute(self, instruction, computation, times, owner):
    cost = self.parts[owner]
    for name in instruction.called("calls"):
      inner = self.program.computations[name]
      for one in self._products(inner):
        cost.add(one, times)
      for kind, collective in _fused_collectives(inner):
        # An asynchronous collective is split over many fusions, all with the same chain_id.
        chain = re.search(r'chain_id="(\d+)"', collective.rest)
        chain = (id(computation), chain[1]) if chain else None
        if chain is None or chain not in self._chains:
          self._communicate(kind, collective, inner, times, part(collective.scope) or owner)
        self._chains.add(chain)
    if instruction.opcode in ("dot", "convolution"):
      cost.add(_product(instruction, computation), times)
    cost.bytes += times * self._bytes(instruction, computation)
    if cycles := re.search(r'"estimated_cycles":"(\d+)"', instruction.rest):
      cost.cycles += times * int(cycles[1])

  def _products(self, computation):
    """Every product in a fusion, including nested fusions."""
    for instruction in computation.instructions.values():
      if instruction.opcode in ("dot", "convolution"):
        yield _product(instruction, computation)
      elif instruction.opcode == "fusion":
        for name in instruction.called("calls"):
          yield from self._products(self.program.computations[name])

  def _communicate(self, kind, instruction, computation, times, default):
    """Adds a collective, which the compiler may have combined from several parts.

    Bytes count for the parts of the operands, the call for the part with the most bytes.
    """
    sizes = collections.Counter()
    for name in instruction.operands:
      operand = computation.instructions[name]
      owner = self._owners.get(id(operand)) or self._part(operand, computation) or default
      if owner == "other":
        owner = default
      sizes[owner] += sum(shape.elements * hlo.width(shape.dtype) for shape in operand.shapes)
    group = _group(instruction)
    if kind == "all-gather":
      sizes = {owner: size * group for owner, size in sizes.items()}
    self.parts[max(sizes, key=sizes.get)].calls[kind] += times
    for owner, size in sizes.items():
      self.parts[owner].collectives[kind, int(size), group] += times
      moved = {"all-gather": 1 + 1 / group, "reduce-scatter": 1 + 1 / group}.get(kind, 2)
      if instruction.shapes[0].space == 0:
        self.parts[owner].bytes += times * moved * size

  def _trips(self, loop, computation):
    trips = self.program.trips(loop, computation)
    if trips is not None:
      return trips
    names = re.findall(r"\w+", loop.scope)
    for name in reversed(names):
      if name in MEASURED_TRIPS:
        self.assumed[name] = MEASURED_TRIPS[name]
        return MEASURED_TRIPS[name]
    self.unknown += 1
    return 1

  def _part(self, instruction, computation):
    """By its own scope, else by that of the computations it calls, else by its operands."""
    if found := part(instruction.scope):
      return found
    for name in instruction.called("calls", "body"):
      inner = self.program.computations[name]
      seen = collections.Counter(part(i.scope) for i in inner.instructions.values())
      seen.pop(None, None)
      if seen:
        return seen.most_common(1)[0][0]
    for name in instruction.operands:
      if name in computation.instructions:
        owner = self._owners.get(id(computation.instructions[name]))
        if owner and owner != "other":
          return owner
    return None

  def _bytes(self, instruction, computation):
    """Bytes read from and written to HBM."""
    opcode, outputs = instruction.opcode, instruction.shapes
    if opcode.endswith("slice-start"):  # ((source), target, …)
      return _moved(outputs[1], outputs[0], outputs[1])
    if opcode.endswith("-start"):  # (target, source, …)
      return sum(_main(shape) for shape in outputs[:2])
    if opcode == "custom-call" and "AllocateBuffer" in instruction.rest:
      return 0
    operands = [computation.instructions[name] for name in instruction.operands]
    if opcode in ("dynamic-slice", "slice", "gather"):
      return _moved(outputs[0], operands[0].shapes[0], outputs[0])
    if opcode == "dynamic-update-slice":
      return 2 * _main(operands[1].shapes[0]) if outputs[0].space == 0 else 0
    if opcode != "fusion":
      return sum(_main(s) for o in operands for s in o.shapes) + sum(map(_main, outputs))
    inner = self.program.computations[instruction.called("calls")[0]]
    total = self._written(inner)
    for number, operand in enumerate(operands):
      if operand.shapes[0].space == 0:
        total += self._read(inner, number, sum(_main(s) for s in operand.shapes))
    return total

  def _read(self, computation, number, whole):
    """Bytes of operand `number` that a fusion reads: only the slices, if it is sliced."""
    parameter = computation.parameters[number]
    total = 0
    for user in computation.users.get(parameter.name, []):
      if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == parameter.name:
        total += sum(shape.bytes for shape in user.shapes)
      elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
        continue  # written in place
      elif _collective(user.opcode) or user.opcode == "tuple":
        continue  # counted by _communicate; not read
      elif user.opcode == "fusion":
        inner = self.program.computations[user.called("calls")[0]]
        for at in (i for i, name in enumerate(user.operands) if name == parameter.name):
          total += self._read(inner, at, whole)
      else:
        return whole
    return min(total, whole)

  def _written(self, computation):
    """Bytes that a fusion writes: only the update, if it updates an array in place."""
    root = computation.instructions[computation.root]
    outputs = root.operands if root.opcode == "tuple" else [root.name]
    total = 0
    for name in outputs:
      output = computation.instructions[name]
      while output.opcode == "bitcast":
        output = computation.instructions[output.operands[0]]
      if output.opcode == "dynamic-update-slice" and output.shapes[0].space == 0:
        total += computation.instructions[output.operands[1]].shapes[0].bytes
      elif output.opcode != "parameter" and not _collective(output.opcode):
        total += sum(map(_main, output.shapes))
    return total


def _main(shape):
  """Bytes in HBM; 0 for scalars, which padding to a tile would overstate."""
  return shape.bytes if shape.space == 0 and shape.dims else 0


def _moved(what, *between):
  """Bytes of `what` times the number of these arrays that are in HBM."""
  return what.bytes * sum(shape.space == 0 for shape in between)


def _collective(opcode):
  name = opcode.removesuffix("-start")
  return name if name in COLLECTIVES else None


def _fused_collectives(computation):
  """Yields (kind, instruction) of a fusion; all-reduce with a slice is a reduce-scatter."""
  sliced = any("dynamic-slice" in i.opcode for i in computation.instructions.values())
  for instruction in computation.instructions.values():
    if kind := _collective(instruction.opcode):
      scattered = kind == "all-reduce" and sliced
      yield ("reduce-scatter" if scattered else kind), instruction


def _group(instruction):
  """Number of chips in a replica group."""
  if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.rest):
    return listed[1].count(",") + 1
  if shaped := re.search(r"replica_groups=\[(\d+),(\d+)\]", instruction.rest):
    return int(shaped[2])
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.rest):
    sizes = dict(re.findall(r"('\w+')=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'\w+'", named[2]))
  return 2  # collective-permute: a source and a target


def _product(instruction, computation):
  left, right = (computation.instructions[name].shapes[0] for name in instruction.operands[:2])
  flops = 2.0 * products.multiplications(instruction, left, right)
  return Cost(flops=flops, passes=flops * products.passes(instruction, left, right))
