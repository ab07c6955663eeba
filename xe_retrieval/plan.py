"""Plan: python -m xe_retrieval.plan --config=configs/cc.py:LOSS --topology=v5e:16x16 [--config.…=…]

Compiles the step that `main` would run for a TPU pod that need not exist (or cpu:8), and prints
memory per chip, FLOPs, collectives and an upper bound on the speed. Needs libtpu
(pip install -e '.[plan]') but no TPU and no network. Compiled programs are cached.

--sweep=v5e:2x4,v5e:4x8 --batch_sizes=512,32768 makes a table, CSV and a plot of all combinations.
"""

import json
import pathlib
import sys
import time

from absl import app, flags
from ml_collections import config_flags

from xe_retrieval import config as config_lib

POSITIONS = 512  # of BERT and most others


def architecture(config, say=lambda line: None):
  """The config with the architecture of its pretrained weights, if they are on this machine."""
  from xe_retrieval.towers import pretrained

  config = config.copy_and_resolve_references()
  with config.unlocked():
    for tower in ("text", "image"):
      source = config[tower].pretrained
      if source and not pathlib.Path(source).expanduser().exists():
        say(f"{source} is not a directory: planning the {tower} tower as the config describes it")
        config[tower].pretrained = ""
        if tower == "text":
          config.text.positions = config.text.get("positions", POSITIONS)
  return pretrained.configure(config)


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; fields are set as --config.batch_size=64")
  f = flags.FLAGS
  if bool(f.topology) == bool(f.sweep):
    sys.exit("error: give either --topology=v5e:16x16 or --sweep=v5e:2x4,v5e:4x8")
  note = _Progress()
  try:
    config = architecture(f.config, note.line)
    if f.sweep:
      _sweep(config, f, note)
    else:
      _one(config, f, note)
  except (ValueError, OSError) as e:
    note.clear()
    sys.exit(f"error: {e}")
  except KeyboardInterrupt:
    note.clear()
    sys.exit("stopped; finished compilations are cached")


def _one(config, f, note):
  from xe_retrieval.planning import plan_text, plans, remedies

  plan = plans.make(config, f.topology, f.only, f.hbm * plan_text.GIB, f.machine_code, note)
  note.clear()
  print(plan_text.describe(plan, f.only))
  found = plan_text.to_dict(plan)
  if not plan.fits and f.remedies and f.only == "step":
    print("\nwhat would fit:", flush=True)
    found["remedies"] = {}
    for remedy in remedies.remedies(plan, config, note):
      note.clear()
      print(plan_text.remedy(remedy), flush=True)
      found["remedies"][remedy.flag] = plan_text.to_dict(remedy.plan)
    note.clear()
    if not any(r["fits"] for r in found["remedies"].values()):
      print("  nothing that was tried; combine them, or reduce the batch size")
  _write_json(f, found)


def _sweep(config, f, note):
  from xe_retrieval.planning import plan_text, plans, sweep

  if wrong := [n for n in f.batch_sizes if not n.isdecimal()]:
    raise ValueError(f"--batch_sizes={','.join(f.batch_sizes)}: {wrong[0]!r} is not a number")
  rows = []
  for batch in map(int, f.batch_sizes or [config.batch_size]):
    for topology in f.sweep:
      changed = config.copy_and_resolve_references()
      changed.batch_size = batch
      try:
        plan = plans.make(changed, topology, f.only, f.hbm * plan_text.GIB, f.machine_code, note)
        rows.append(sweep.Row(topology, batch, plan))
        note.line(f"{topology}, batch {batch:,}: {plan_text.verdict(plan)}")
      except ValueError as e:  # go on with the others
        rows.append(sweep.Row(topology, batch, None, str(e)))
        note.line(f"{topology}, batch {batch:,}: {e}")
  if not any(row.plan for row in rows):
    raise ValueError(rows[0].error)
  print(sweep.table(rows))
  for path in sweep.write(pathlib.Path(f.out), rows):
    print(path)
  _write_json(f, [plan_text.to_dict(row.plan) for row in rows if row.plan])


def _write_json(f, found):
  if f.json:
    pathlib.Path(f.json).write_text(json.dumps(found, indent=2) + "\n")


class _Progress:
  """A line on stderr, updated in place on a terminal; in a log file, a line every half minute."""

  def __init__(self):
    self._last, self._shown = 0.0, False

  def __call__(self, text):
    if sys.stderr.isatty():
      print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
      self._shown = True
    elif time.monotonic() - self._last > 30:
      print(text, file=sys.stderr, flush=True)
      self._last = time.monotonic()

  def line(self, text):
    self.clear()
    print(text, file=sys.stderr, flush=True)

  def clear(self):
    if self._shown:
      print("\r\033[K", end="", file=sys.stderr, flush=True)
      self._shown = False


def _define_flags():
  config_flags.DEFINE_config_file(
    "config",
    None,
    "What to plan: a file of configs/, and after a colon the loss.",
    lock_config=True,
  )
  flags.mark_flag_as_required("config")
  flags.DEFINE_string("topology", "", "Chips to plan for, as v5e:16x16 (TPU) or cpu:8.")
  flags.DEFINE_list("sweep", [], "Several topologies: a table, CSV and a plot.")
  flags.DEFINE_list("batch_sizes", [], "Batch sizes of a sweep; default: the config's.")
  flags.DEFINE_enum("only", "step", ["step", "loss"], "The whole step, or the loss by itself.")
  flags.DEFINE_float("hbm", 0, "GiB of memory per chip; 0: that of the chip.", lower_bound=0)
  flags.DEFINE_bool(
    "machine_code",
    False,
    "Let the TPU compiler finish, which takes ten times as long: adds its own estimate of time.",
  )
  flags.DEFINE_bool("remedies", True, "If the step does not fit, try changes that may make it fit.")
  flags.DEFINE_string("json", "", "Write all figures to this file.")
  flags.DEFINE_string("out", "runs/plan", "Directory for a sweep's sweep.csv and sweep.png.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=config_lib.parse_flags)
