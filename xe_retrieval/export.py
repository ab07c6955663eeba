"""Export a trained model for use elsewhere: python -m xe_retrieval.export --workdir=DIR --out=DIR

Writes Hugging Face directories of both towers, the projections, a serialised jax function per
tower, the calibration of this checkpoint if it was evaluated, and a README.md that says
how to use each. towers/export_format.py defines the format.
"""

import functools
import pathlib
import sys

from absl import app, flags

from xe_retrieval import config as config_lib


def export(workdir, out, which="best"):
  """The best (or latest) checkpoint of a workdir as a new directory."""
  from xe_retrieval import model as models
  from xe_retrieval.calibration import artifact
  from xe_retrieval.towers import bank as banks
  from xe_retrieval.towers import export_format

  out = pathlib.Path(out).expanduser()
  encoder = models.restore(workdir, which)
  export_format.write(encoder, out)
  fingerprint = encoder.fingerprint()
  if calibration := artifact.read(workdir, fingerprint):
    calibration.write(out)
  elif bank := banks.read(workdir, fingerprint):
    bank.write(out / banks.NAME)
  return out


def main(argv):
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; the run is named as --workdir={argv[1]}")
  try:
    out = export(flags.FLAGS.workdir, flags.FLAGS.out, flags.FLAGS.checkpoint)
  except ValueError as e:
    sys.exit(f"error: {e}")
  for path in sorted(p for p in out.rglob("*") if p.is_file()):
    print(f"{path.stat().st_size / 2**20:9.2f} MB  {path}")


def _define_flags():
  """Not on import: commands share flag names, and all can be imported together."""
  flags.DEFINE_string("workdir", None, "The workdir of a training run.", required=True)
  flags.DEFINE_string("out", None, "The directory to write; new or empty.", required=True)
  flags.DEFINE_enum("checkpoint", "best", ["best", "latest"], "Which checkpoint to export.")


if __name__ == "__main__":
  _define_flags()
  parse = functools.partial(config_lib.parse_flags, remote=("workdir",))
  app.run(main, flags_parser=parse)
