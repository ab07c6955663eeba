"""A parser for HLO text: computations, instructions, shapes, trip counts of loops."""

import dataclasses
import functools
import math
import re

WIDTH = {
  "pred": 1,
  "s4": 0.5,
  "u4": 0.5,
  "token": 0,
  "opaque": 0,
}  # bytes; else the bits in the name
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::((?:[A-Z]+\([^)]*\)|\([^)]*\))*))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_TILE = re.compile(r"T\(([\d,]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array; `space` is 0 for HBM, other numbers for on-chip memory."""

  dtype: str
  dims: tuple[int, ...]
  order: tuple[int, ...] = ()  # axes, minor to major
  tile: tuple[int, ...] = ()
  space: int = 0

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @functools.cached_property
  def bytes(self) -> int:
    """Size in memory, with the minor axes padded to whole tiles."""
    dims = list(self.dims)
    for axis, tile in zip(self.order, reversed(self.tile), strict=False):
      dims[axis] = -(-dims[axis] // tile) * tile
    return int(math.prod(dims) * width(self.dtype))


def width(dtype: str) -> float:
  """Bytes per element."""
  if dtype in WIDTH:
    return WIDTH[dtype]
  bits = re.match(r"[a-z]+(\d+)", dtype)
  return int(bits[1]) / 8 if bits else 0


@dataclasses.dataclass
class Instruction:
  name: str
  shapes: list[Shape]  # several for a tuple
  opcode: str
  operands: list[str]
  rest: str  # attributes, as text
  argument: str  # text between the parentheses

  @functools.cached_property
  def scope(self) -> str:
    """The op_name of its metadata, as jit(train_step)/…; "" if it has none."""
    found = re.search(r'op_name="([^"]*)"', self.rest)
    return found[1] if found else ""

  def called(self, *attributes) -> list[str]:
    """Names of the computations that these attributes refer to."""
    return [name for a in attributes for name in re.findall(rf"\b{a}=%([\w.\-]+)", self.rest)]


@dataclasses.dataclass
class Computation:
  instructions: dict[str, Instruction]
  root: str = ""

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """Name of an instruction -> instructions that have it as an operand."""
    users = {}
    for instruction in self.instructions.values():
      for operand in set(instruction.operands):
        users.setdefault(operand, []).append(instruction)
    return users

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    found = (i for i in self.instructions.values() if i.opcode == "parameter")
    return {int(i.argument): i for i in found}


@dataclasses.dataclass
class Program:
  computations: dict[str, Computation]
  entry: str

  def trips(self, loop: Instruction, within: Computation) -> int | None:
    """Trip count of a while loop; None if it is not a constant."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
      return int(known[1])
    test = self.computations[loop.called("condition")[0]]
    compare = test.instructions[test.root]
    if compare.opcode != "compare" or "direction=LT" not in compare.rest:
      return None
    start = within.instructions.get(loop.operands[0])
    low, high = (_number(test.instructions[o], within, start) for o in compare.operands)
    return None if low is None or high is None else max(high - low, 0)


def parse(text: str) -> Program:
  computations, entry, current = {}, "", None
  for line in text.splitlines():
    if current is None:
      if line.endswith("{") and " -> " in line:
        name = _NAME.search(line)[1]
        computations[name] = current = Computation({})
        entry = name if line.startswith("ENTRY") else entry
    elif line.startswith("}"):
      current = None
    elif " = " in line:
      instruction = _instruction(line)
      current.instructions[instruction.name] = instruction
      if line.lstrip().startswith("ROOT "):
        current.root = instruction.name
  return Program(computations, entry)


def _instruction(line):
  left, right = line.split(" = ", 1)
  end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
  opened = right.index("(", end)
  closed = _closing(right, opened)
  argument = right[opened + 1 : closed]
  return Instruction(
    name=_NAME.search(left)[1],
    shapes=shapes(right[:end]),
    opcode=right[end:opened].strip(),
    operands=_NAME.findall(argument),
    rest=right[closed + 1 :],
    argument=argument,
  )


@functools.lru_cache(maxsize=100_000)
def _shape(dtype, dims, order, layout):
  numbers = lambda text: tuple(int(n) for n in text.split(",") if n)  # noqa: E731
  tile, space = _TILE.search(layout), _SPACE.search(layout)
  return Shape(
    dtype,
    numbers(dims),
    numbers(order),
    numbers(tile[1]) if tile else (),
    int(space[1]) if space else 0,
  )


def shapes(text: str) -> list[Shape]:
  """Parses an array or a tuple, as f32[8,128]{1,0:T(8,128)S(1)}."""
  return [_shape(*found) for found in _SHAPE.findall(text)]


def _closing(text, opened):
  """Index of the parenthesis that matches the one at `opened`."""
  depth = 0
  for found in re.finditer(r"[()]", text[opened:]):
    depth += 1 if found[0] == "(" else -1
    if depth == 0:
      return opened + found.start()
  raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _number(instruction, outside, start):
  """Initial value of an operand of a loop's condition, or None if it is not a constant."""
  if instruction.opcode == "constant":
    return int(instruction.argument) if re.fullmatch(r"-?\d+", instruction.argument) else None
  if instruction.opcode != "get-tuple-element" or start is None or start.opcode != "tuple":
    return None
  at = int(re.search(r"index=(\d+)", instruction.rest)[1])
  value = outside.instructions[start.operands[at]]
  while value.opcode in ("copy", "bitcast", "copy-done"):
    value = outside.instructions[value.operands[0]]
    if value.opcode == "copy-start":
      value = outside.instructions[value.operands[0]]
  return _number(value, None, None) if value.opcode == "constant" else None
