"""Changes that may make a step fit into memory, each tried by compiling it."""

import dataclasses

from xe_retrieval.planning import chips, plans

TRIES = 3  # of each kind


@dataclasses.dataclass(frozen=True)
class Remedy:
  flag: str  # as on the command line
  plan: plans.Plan


def remedies(plan: plans.Plan, config, say=lambda line: None):
  """Yields each remedy tried, fitting or not; of each kind, up to the first that fits.

  `config` is that of the plan. Remedies that cannot save enough memory are not tried.
  """
  for kind in (_sharded, _remat, _micro_batch, _more_chips):
    for flag, changes, topology in kind(plan, config):
      changed = config.copy_and_resolve_references()
      changed.update_from_flattened_dict(changes)
      say(f"{plan.topology.name} is too small; trying {flag}")
      try:
        remedy = Remedy(flag, plans.make(changed, topology, limit=plan.limit, say=say))
      except ValueError as e:  # the compiler may fail
        say(f"{flag}: {e}")
        continue
      yield remedy
      if remedy.plan.fits:
        break


def _sharded(plan, config):
  state = plan.memory["parameters"] + plan.memory["optimiser"]
  saved = state * (1 - 1 / plan.topology.size)
  if not config.mesh.shard_parameters and (plan.used is None or plan.used - saved < plan.limit):
    flag = "--config.mesh.shard_parameters=True"
    yield flag, {"mesh.shard_parameters": True}, plan.topology.name


def _remat(plan, config):
  if not config.remat:
    yield "--config.remat=True", {"remat": True}, plan.topology.name


def _micro_batch(plan, config):
  """From the largest that may fit downwards: activations are proportional to the rows."""
  rows = config.micro_batch or config.batch_size
  state = plan.memory["parameters"] + plan.memory["optimiser"] + plan.memory["batch"]
  room, needed = plan.limit - state, (plan.used or plan.limit) - state
  allowed = [
    n
    for n in (rows >> shift for shift in range(1, 20))
    if n and n % plan.topology.size == 0 and config.batch_size % n == 0
  ]
  likely = [n for n in allowed if needed * n / rows < room] or allowed[-1:]
  for micro in likely[:TRIES]:
    yield f"--config.micro_batch={micro}", {"micro_batch": micro}, plan.topology.name


def _more_chips(plan, config):
  """The smallest topologies of the same chip that may fit and that divide the batch."""
  here, chip = plan.topology, plan.topology.chip
  known = sorted((chips.topology(name) for name in chips.KNOWN), key=lambda t: t.size)
  if chip.name == "cpu":
    known = [chips.topology(f"cpu:{here.size << shift}") for shift in range(1, 5)]
  least = here.size * (plan.used or plan.limit) / plan.limit
  larger = [
    t.name
    for t in known
    if t.chip == chip and t.size > max(here.size, least / 2) and config.batch_size % t.size == 0
  ]
  rows = config.micro_batch
  for name in larger[:TRIES]:
    if not rows or rows % chips.topology(name).size == 0:
      yield f"--topology={name}", {}, name
