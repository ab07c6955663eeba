"""What the binaries share: quiet libraries, and one sentence instead of a traceback."""

import sys

from absl import flags, logging


def quieten():
  """Libraries report errors only, unless --verbosity asks for more."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.ERROR)


def parse(argv):
  """absl's parser, with one sentence instead of a traceback for a misspelt or mistyped field."""
  try:
    return flags.FLAGS(argv)
  except (AttributeError, KeyError, TypeError, ValueError, FileNotFoundError, flags.Error) as e:
    sys.exit(f"error: {e.args[0] if e.args else e}")
