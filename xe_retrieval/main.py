"""Train: python -m xe_retrieval.main --config=configs/cc.py:LOSS --workdir=DIR [--config.…=…]

Rerunning the same command resumes. On many hosts, see launch/.

Exit codes: 0, trained to the last step; 75 (EX_TEMPFAIL), stopped by SIGTERM or Ctrl-C with the
state saved, to be run again; anything else is a failure.
"""

import functools
import sys

from absl import app, flags
from ml_collections import config_flags

from xe_retrieval import config as config_lib

STOPPED = 75  # EX_TEMPFAIL of sysexits.h; schedulers take 0 for finished


def train(config, workdir, devices=None, allow_config_change=False):
  """Trains in `workdir`, with evaluation's metrics on the validation split -> TrainState.

  A config with a field first_stage is that of a re-ranker.
  """
  if "first_stage" in config:
    from xe_retrieval.reranking import training

    return training.train(config, workdir, devices, allow_config_change)
  import jax

  from xe_retrieval.calibration import run as runs
  from xe_retrieval.evaluation import figures
  from xe_retrieval.towers import bank
  from xe_retrieval.training import loop

  state = loop.train(config, workdir, figures.validation, devices, allow_config_change)
  finished = int(state.step) >= config.steps
  if finished and bank.correction(config) and jax.process_count() == 1:
    _ = runs.Run(workdir).bank  # written beside the checkpoint; on many hosts evaluate makes it
  return state


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; fields are set as --config.batch_size=64")
  # Imported late: --help and misspelt flags should not wait for JAX.
  from xe_retrieval.data import mesh
  from xe_retrieval.training import dry_run, loop, processes

  f = flags.FLAGS
  with processes.together(f.distributed):
    try:
      if f.dry_run and "first_stage" in f.config:
        from xe_retrieval.reranking import training

        print(training.describe(f.config))
      elif f.dry_run:
        config, source, _, _ = loop.prepare(f.config, mesh.make())
        print(dry_run.describe(config, f.workdir, source, mesh.make()))
      else:
        state = train(f.config, f.workdir, allow_config_change=f.allow_config_change)
        if int(state.step) < f.config.steps:
          sys.exit(STOPPED)
    except (ValueError, OSError, FloatingPointError) as e:
      sys.exit(f"error: {e}")


def define_flags():
  """Not on import: several commands define flags of the same name and can be imported together."""
  config_flags.DEFINE_config_file(
    "config",
    None,
    "What to train: a file of configs/, and after a colon the loss.",
    lock_config=True,
  )
  flags.DEFINE_string(
    "workdir", None, "Directory of checkpoints and logs. Rerunning the same command resumes."
  )
  flags.DEFINE_bool("dry_run", False, "Only print sizes, memory of a step and learning rates.")
  flags.DEFINE_bool(
    "allow_config_change", False, "Resume a workdir although the config has changed."
  )
  flags.DEFINE_bool(
    "distributed", False, "One of the processes of a SLURM job or TPU pod; JAX finds the others."
  )
  flags.mark_flags_as_required(["config", "workdir"])


if __name__ == "__main__":
  define_flags()
  parse = functools.partial(config_lib.parse_flags, remote=("workdir",))
  app.run(main, flags_parser=parse)
