"""What the binaries share: quiet libraries, and one sentence instead of a traceback."""

import re
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
  except (AttributeError, KeyError) as e:  # ml_collections' word for a field that is not there
    near = re.search(r'Did you mean "(.*?)" instead of "(.*?)"', str(e))
    wrong = [a for a in argv if near and f"{near[2]}=" in a] or [str(e)]
    hint = f"; did you mean {near[1]!r}?" if near else ""
    sys.exit(f"error: {wrong[0]}: the config has no such field{hint}")
  except (TypeError, ValueError, FileNotFoundError, flags.Error) as e:
    sys.exit(f"error: {e}")
