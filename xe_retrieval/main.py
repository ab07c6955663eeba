"""Train: python -m xe_retrieval.main --config=configs/cc.py:LOSS --workdir=DIR [--config.…=…]"""

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
flags.mark_flags_as_required(["config", "workdir"])


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; fields are set as --config.batch_size=64")
  command_line.quieten()
  from xe_retrieval import train  # here: --help and misspelt flags answer at once

  try:
    train.train(_CONFIG.value, _WORKDIR.value)
  except ValueError as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse)
