"""Train: python -m xe_retrieval.main --config=configs/cc.py:LOSS --workdir=DIR [--config.…=…]

Rerunning the same command resumes. On many hosts, see launch/.
"""

import sys

from absl import app, flags
from ml_collections import config_flags

from xe_retrieval import command_line

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "What to train: a file of configs/, and after a colon the loss.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where checkpoints and logs go. Rerunning the same command resumes there."
)
_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Only say what would be trained: sizes, memory of a step, learning rates."
)
_ALLOW_CONFIG_CHANGE = flags.DEFINE_bool(
  "allow_config_change", False, "Resume a workdir although the config is no longer the same."
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "One of the processes of a SLURM job or of a TPU pod; JAX finds the others."
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; fields are set as --config.batch_size=64")
  command_line.quieten()
  # Here: --help and misspelt flags answer at once.
  from xe_retrieval import train
  from xe_retrieval.training import dry_run, mesh, processes

  processes.join(_DISTRIBUTED.value)
  try:
    if _DRY_RUN.value:
      config, source, _, _ = train.prepare(_CONFIG.value, mesh.make())
      print(dry_run.describe(config, _WORKDIR.value, source, mesh.make()))
    else:
      train.train(_CONFIG.value, _WORKDIR.value, allow_config_change=_ALLOW_CONFIG_CHANGE.value)
  except (ValueError, OSError, FloatingPointError) as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse)
