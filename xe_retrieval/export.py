"""Export a trained model for use elsewhere: python -m xe_retrieval.export --workdir=DIR --out=DIR

Writes Hugging Face directories of both towers, the projections, and a serialised jax function per
tower, and the thresholds of the last evaluation if they are of this very checkpoint; the README.md
beside them says how to use each. exported.py has the format.
"""

import pathlib
import shutil
import sys

from absl import app, flags

from xe_retrieval import command_line


def export(workdir, out, which="best"):
  """The best (or latest) checkpoint of a workdir as a new directory."""
  from xe_retrieval import exported
  from xe_retrieval.retrieval import cutoff, embed

  out = pathlib.Path(out).expanduser()
  encoder = embed.restore(workdir, which)
  exported.write(encoder, out)
  if cutoffs := cutoff.of_model(workdir, encoder.fingerprint()):
    shutil.copyfile(cutoffs.path, out / cutoff.NAME)
  return out


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; the run is named as --workdir={argv[1]}")
  command_line.quieten()
  try:
    out = export(flags.FLAGS.workdir, flags.FLAGS.out, flags.FLAGS.checkpoint)
  except ValueError as e:
    sys.exit(f"error: {e}")
  for path in sorted(p for p in out.rglob("*") if p.is_file()):
    print(f"{path.stat().st_size / 2**20:9.2f} MB  {path}")


def _define_flags():
  """Not on import: the binaries share names of flags, and all can be imported together."""
  flags.DEFINE_string("workdir", None, "The workdir of a training run.", required=True)
  flags.DEFINE_string("out", None, "The directory to write; new or empty.", required=True)
  flags.DEFINE_enum("checkpoint", "best", ["best", "latest"], "Which checkpoint to export.")


if __name__ == "__main__":
  _define_flags()
  app.run(main, flags_parser=command_line.parse)
